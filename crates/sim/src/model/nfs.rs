//! A slow volume on NFS: a network in front of a server whose writes are stable before they are answered.
//!
//! [`NfsFigures::ESX_SLOW`] stands for the destination of the ESX paper's figure 10. The paper states only what the
//! 16-outstanding OLTP load reaches on it. That is about 200 reads and 95 writes a second of 8 KiB, a tenth of the
//! source. Fitted to that: two disks of 7200 rpm that write through, of which the volume takes the outer part. The rest
//! is assumed: 1 Gbit/s, 0.3 ms there and back, the server's cache hits nothing.

use std::collections::VecDeque;
use std::time::Duration;

use env::Moment;

use super::channels::{Endings, Server};
use super::hard_disk::{HardDisk, HardDiskFigures};
use super::{Model, Raid0, Request, Ticket, Verb, transfer};
use crate::numbers::NumberMap;

/// What a volume on NFS is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NfsFigures {
    /// The server's disks.
    pub disk: HardDiskFigures,
    /// How many of them.
    pub disks: usize,
    /// Bytes a second over the network, each way.
    pub network_rate: u64,
    /// There and back, without anything on the way.
    pub round_trip: Duration,
    /// What the server takes for a call, one after another.
    pub call: Duration,
}

impl NfsFigures {
    /// See the module's head.
    pub const ESX_SLOW: Self = Self {
        disk: HardDiskFigures::ST31000524AS.without_write_cache(),
        disks: 2,
        network_rate: 117_000_000,
        round_trip: Duration::from_micros(300),
        call: Duration::from_micros(50),
    };
}

/// A volume on NFS.
pub struct Nfs {
    figures: NfsFigures,
    to_server: Server,
    to_client: Server,
    server: Server,
    disks: Raid0,
    arriving: VecDeque<(Moment, Ticket, Request)>,
    under_way: NumberMap<u64, Request>,
    endings: Endings,
    disk_done: Vec<Ticket>,
}

impl Nfs {
    /// An idle volume.
    #[must_use]
    pub fn new(figures: NfsFigures) -> Self {
        let members = (0..figures.disks).map(|_| Box::new(HardDisk::new(figures.disk)) as Box<dyn Model>);
        Self {
            figures,
            to_server: Server::default(),
            to_client: Server::default(),
            server: Server::default(),
            disks: Raid0::new(members.collect(), 64 << 10),
            arriving: VecDeque::new(),
            under_way: NumberMap::default(),
            endings: Endings::default(),
            disk_done: Vec::new(),
        }
    }
}

impl Model for Nfs {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        let payload = if request.verb == Verb::Write { request.length } else { 0 };
        let sent = self.to_server.serve(now, transfer(payload, self.figures.network_rate));
        let at = self.server.serve(sent + self.figures.round_trip / 2, self.figures.call);
        self.arriving.push_back((at, ticket, request));
    }

    fn next(&self) -> Option<Moment> {
        let arrival = self.arriving.front().map(|(at, ..)| *at);
        [arrival, self.disks.next(), self.endings.next()].into_iter().flatten().min()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        while let Some(next) = self.next().filter(|next| *next <= now) {
            while let Some((at, ticket, request)) = self.arriving.front().copied().filter(|(at, ..)| *at <= next) {
                self.arriving.pop_front();
                self.under_way.insert(ticket.0, request);
                self.disks.submit(at, ticket, request);
            }
            let mut disk_done = std::mem::take(&mut self.disk_done);
            self.disks.advance(next, &mut disk_done);
            for ticket in disk_done.drain(..) {
                let request = self.under_way.remove(&ticket.0).expect("what the disks did was asked of them");
                let payload = if request.verb == Verb::Read { request.length } else { 0 };
                let sent = self.to_client.serve(next, transfer(payload, self.figures.network_rate));
                self.endings.add(sent + self.figures.round_trip / 2, ticket);
            }
            self.disk_done = disk_done;
            while let Some((_, ticket)) = self.endings.take(next) {
                done.push(ticket);
            }
        }
    }
}
