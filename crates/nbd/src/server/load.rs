//! How much a connection has under way.

use super::Limits;
use super::quota::Quota;

/// How much of the connection's allowance is taken, and of its export's.
pub(super) struct Load<'a> {
    requests: usize,
    bytes: usize,
    quota: &'a Quota,
}

impl<'a> Load<'a> {
    pub(super) const fn new(quota: &'a Quota) -> Self {
        Self { requests: 0, bytes: 0, quota }
    }

    pub(super) fn take(&mut self, cost: usize) {
        self.requests += 1;
        self.bytes += cost;
        self.quota.begin_request();
    }

    pub(super) fn release(&mut self, cost: usize) {
        self.requests -= 1;
        self.bytes -= cost;
        self.quota.end_requests(1);
    }

    /// One request is always let in. Others wait for those of their own connection, so nobody else has to wake it.
    pub(super) fn has_room(&self, limits: &Limits) -> bool {
        self.requests == 0
            || (self.requests < limits.requests_in_flight_max
                && self.bytes < limits.bytes_in_flight_max.as_usize()
                && self.quota.has_room())
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        self.quota.end_requests(self.requests);
    }
}
