//! The simulated disk is a device like any other: with its faults off it passes the suite that all of them pass.

use block::testing::conformance;
use sim::disk::{Disk, Timing};
use sim::log::Keep;
use sim::world::World;
use transhume_sim as sim;

#[test]
fn the_simulated_disk_conforms() {
    for seed in 0..3 {
        sim::clock::run(async {
            let world = World::new(seed, Keep::Tail);
            let make = async |size| Disk::new(&world, "disk", size, 1, Timing::FLASH).open(0).await;
            conformance(seed, make).await;
            assert_eq!(world.violation(), None);
        });
    }
}
