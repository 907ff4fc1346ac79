//! RAID-0: stripes over members, no redundancy and no cache of its own.
//!
//! A request is cut at stripe borders. The parts on one member are one request there if the stripes follow one another
//! on that member. It is done when its last part is. The bookkeeping takes no time.

use env::Moment;

use super::{Model, Request, Ticket, Verb};
use crate::numbers::NumberMap;

/// Models side by side.
pub struct Raid0 {
    members: Vec<Box<dyn Model>>,
    stripe: u64,
    /// Requests under way by the number that their parts carry.
    under_way: NumberMap<u64, (Ticket, usize)>,
    count: u64,
    part_done: Vec<Ticket>,
}

impl Raid0 {
    /// Stripes of `stripe` bytes over `members`.
    ///
    /// # Panics
    /// Without members or with empty stripes.
    #[must_use]
    pub fn new(members: Vec<Box<dyn Model>>, stripe: u64) -> Self {
        assert!(!members.is_empty() && stripe > 0, "a RAID-0 needs members and stripes");
        Self { members, stripe, under_way: NumberMap::default(), count: 0, part_done: Vec::new() }
    }

    /// The part of `request` that lies on each member, in its own offsets.
    pub(super) fn parts(&self, request: &Request) -> Vec<(usize, Request)> {
        let members = self.members.len() as u64;
        if request.verb == Verb::Flush {
            return (0..self.members.len()).map(|member| (member, *request)).collect();
        }
        let mut parts: Vec<(usize, Request)> = Vec::new();
        let mut offset = request.offset;
        while offset < request.end() {
            let number = offset / self.stripe;
            let length = ((number + 1) * self.stripe).min(request.end()) - offset;
            let member = (number % members) as usize;
            let place = number / members * self.stripe + offset % self.stripe;
            // Stripes of one member follow one another there, though not here.
            match parts.iter_mut().find(|(known, part)| *known == member && part.end() == place) {
                Some((_, part)) => part.length += length,
                None => parts.push((member, Request { verb: request.verb, offset: place, length })),
            }
            offset += length;
        }
        parts
    }
}

impl Model for Raid0 {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        let parts = self.parts(&request);
        self.count += 1;
        self.under_way.insert(self.count, (ticket, parts.len()));
        for (member, part) in parts {
            self.members[member].submit(now, Ticket(self.count), part);
        }
    }

    fn next(&self) -> Option<Moment> {
        self.members.iter().filter_map(|member| member.next()).min()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        for member in &mut self.members {
            if member.next().is_none_or(|next| next > now) {
                continue;
            }
            member.advance(now, &mut self.part_done);
            for part in self.part_done.drain(..) {
                let (ticket, left) = self.under_way.get_mut(&part.0).expect("a part belongs to a request");
                *left -= 1;
                if *left == 0 {
                    done.push(*ticket);
                    self.under_way.remove(&part.0);
                }
            }
        }
    }
}
