//! The simulated disk and the modelled volume are devices like any other: with faults off they pass the suite that all
//! of them pass.

use block::testing::conformance;
use sim::disk::{Disk, Timing};
use sim::log::Keep;
use sim::model::contents::Origin;
use sim::model::{Flash, FlashFigures, HardDisk, HardDiskFigures, Volume};
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

#[test]
fn a_modelled_volume_conforms_whatever_it_lies_on() {
    for seed in 0..2 {
        sim::clock::run(async {
            let world = World::new(seed, Keep::Tail);
            let make = async |size| {
                let flash = Flash::new(FlashFigures::NVME_512GB);
                Volume::new(&world, "volume", size, Origin::Empty, flash).device()
            };
            conformance(seed, make).await;
            let make = async |size| {
                let disk = HardDisk::new(HardDiskFigures::ST31000524AS);
                Volume::new(&world, "volume", size, Origin::Empty, disk).device()
            };
            conformance(seed, make).await;
        });
    }
}
