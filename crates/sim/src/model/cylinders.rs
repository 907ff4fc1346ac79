//! Where the bytes of a hard disk lie: zones of cylinders, more bytes a track outside than inside.

/// Zones of equally many cylinders; the first lies outside.
pub(super) struct Cylinders {
    zones: Vec<Zone>,
    total: f64,
}

struct Zone {
    first_byte: u64,
    first_cylinder: f64,
    cylinder_bytes: f64,
    rate: u64,
}

const ZONES: u64 = 16;

impl Cylinders {
    /// A disk of `capacity` bytes whose tracks give `outer` bytes a second outside and `inner` inside. A turn takes
    /// `revolution_ns`, and a cylinder has `heads` tracks.
    pub(super) fn new(capacity: u64, outer: u64, inner: u64, revolution_ns: u64, heads: u64) -> Self {
        let rate_of = |zone: u64| outer - (outer - inner) * zone / (ZONES - 1);
        let rates_sum: u64 = (0..ZONES).map(rate_of).sum();
        let mut zones = Vec::new();
        let (mut byte, mut cylinder) = (0_u64, 0.0);
        for zone in 0..ZONES {
            let rate = rate_of(zone);
            // As many cylinders each, so as many bytes as the rate tells.
            let bytes = (u128::from(capacity) * u128::from(rate) / u128::from(rates_sum)) as u64;
            let cylinder_bytes = rate as f64 * revolution_ns as f64 / 1e9 * heads as f64;
            zones.push(Zone { first_byte: byte, first_cylinder: cylinder, cylinder_bytes, rate });
            byte += bytes;
            cylinder += bytes as f64 / cylinder_bytes;
        }
        Self { zones, total: cylinder }
    }

    fn zone(&self, offset: u64) -> &Zone {
        let next = self.zones.partition_point(|zone| zone.first_byte <= offset);
        &self.zones[next - 1]
    }

    /// Which part of all cylinders lies between two places; zero within one cylinder.
    pub(super) fn distance(&self, one: u64, other: u64) -> f64 {
        (self.cylinder(one) - self.cylinder(other)).abs() / self.total
    }

    fn cylinder(&self, offset: u64) -> f64 {
        let zone = self.zone(offset);
        (zone.first_cylinder + (offset - zone.first_byte) as f64 / zone.cylinder_bytes).floor()
    }

    /// How many bytes a second pass below the head at `offset`.
    pub(super) fn rate(&self, offset: u64) -> u64 {
        self.zone(offset).rate
    }

    /// Where on its track `offset` lies, from 0 up to, not including, 1.
    pub(super) fn angle(&self, offset: u64, revolution_ns: u64) -> f64 {
        let zone = self.zone(offset);
        let track_bytes = zone.rate as f64 * revolution_ns as f64 / 1e9;
        ((offset - zone.first_byte) as f64 / track_bytes).fract()
    }
}
