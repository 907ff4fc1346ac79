//! Groups of disks behind one controller: each has the same number of addresses, one group's after another's.
//!
//! A request lies on the group on which it begins. Nobody asks for bytes across a border: volumes on different groups
//! are far apart.

use env::Moment;

use super::{Model, Request, Ticket, Verb};
use crate::numbers::NumberMap;

/// Models one behind the other.
pub struct Groups {
    members: Vec<Box<dyn Model>>,
    /// Addresses of one group.
    bytes: u64,
    /// Flushes under way, which every group carries out.
    flushes: NumberMap<Ticket, usize>,
    member_done: Vec<Ticket>,
}

impl Groups {
    /// `members` with addresses for `bytes` each.
    ///
    /// # Panics
    /// Without members or addresses.
    #[must_use]
    pub fn new(members: Vec<Box<dyn Model>>, bytes: u64) -> Self {
        assert!(!members.is_empty() && bytes > 0, "groups have members and addresses");
        Self { members, bytes, flushes: NumberMap::default(), member_done: Vec::new() }
    }
}

impl Model for Groups {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        if request.verb == Verb::Flush {
            self.flushes.insert(ticket, self.members.len());
            return self.members.iter_mut().for_each(|member| member.submit(now, ticket, request));
        }
        let group = ((request.offset / self.bytes) as usize).min(self.members.len() - 1);
        let offset = request.offset - group as u64 * self.bytes;
        self.members[group].submit(now, ticket, Request { offset, ..request });
    }

    fn next(&self) -> Option<Moment> {
        self.members.iter().filter_map(|member| member.next()).min()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        for member in &mut self.members {
            if member.next().is_none_or(|next| next > now) {
                continue;
            }
            member.advance(now, &mut self.member_done);
            for ticket in self.member_done.drain(..) {
                let Some(left) = self.flushes.get_mut(&ticket) else {
                    done.push(ticket);
                    continue;
                };
                *left -= 1;
                if *left == 0 {
                    self.flushes.remove(&ticket);
                    done.push(ticket);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{HardDisk, HardDiskFigures};

    #[test]
    fn each_group_serves_its_own_addresses_and_a_flush_is_done_once() {
        let disk = || Box::new(HardDisk::new(HardDiskFigures::CHEETAH_15K)) as Box<dyn Model>;
        let end = |requests: &[Request]| {
            let mut groups = Groups::new(vec![disk(), disk()], 100 << 30);
            for (number, request) in requests.iter().enumerate() {
                groups.submit(Moment(std::time::Duration::ZERO), Ticket(number as u64), *request);
            }
            let (mut done, mut last) = (Vec::new(), Moment(std::time::Duration::ZERO));
            while let Some(next) = groups.next() {
                last = next;
                groups.advance(next, &mut done);
            }
            assert_eq!(done.len(), requests.len());
            last
        };
        let one = Request::read(0, 100 << 20);
        let alone = end(&[one]);
        assert_eq!(end(&[one, Request::read(100 << 30, 100 << 20)]), alone, "they do not wait for each other");
        assert!(end(&[one, Request::read(1 << 30, 100 << 20)]) > alone);
        end(&[Request::flush()]);
    }
}
