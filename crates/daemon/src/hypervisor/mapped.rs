//! Which file that a QEMU has mapped is which part of its guest's memory.
//!
//! A part lies in a file that the command line names, or in one that QEMU makes in a folder that it names: `qemu_back_mem.ID.*`, whose
//! name QEMU takes away at once. Several parts may lie in one folder, and be of one size. Taken for each other they would be memory at the
//! wrong address, so a part is known by its id, and one for which two files could be meant is refused.

use std::path::Path;

use memory::MappedFile;
use vm::machine::SharedMemory;

/// What QEMU's files in a folder begin with.
const PREFIX: &str = "qemu_back_mem.";
/// What QEMU's library makes of the end of such a name.
const RANDOM_LETTERS: usize = 6;

/// The file of each of `backends`, in their order; or the one that has none, or that could have several, and why.
pub(super) fn find(mapped: &[MappedFile], backends: &[SharedMemory]) -> Result<Vec<MappedFile>, String> {
    let mut found: Vec<MappedFile> = Vec::with_capacity(backends.len());
    for backend in backends {
        let mut candidates = mapped.iter().filter(|file| is_of(backend, file));
        let file = match (candidates.next(), candidates.next()) {
            (Some(file), None) => file,
            (None, _) => return Err(format!("the memory {} is not mapped as {}", backend.id, backend.path)),
            (Some(_), Some(_)) => {
                return Err(format!("several files in {} could be the memory {}", backend.path, backend.id));
            }
        };
        if found.iter().any(|other| other.identity == file.identity) {
            return Err(format!("{} is the memory {} and another one", file.name, backend.id));
        }
        found.push(file.clone());
    }
    Ok(found)
}

fn is_of(backend: &SharedMemory, file: &MappedFile) -> bool {
    // A file whose name was taken away still has its mapping.
    let name = file.name.strip_suffix(" (deleted)").unwrap_or(&file.name);
    let is_in_folder = || {
        let path = Path::new(name);
        let own = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(PREFIX));
        path.parent() == Some(Path::new(&backend.path)) && own.is_some_and(|own| is_named(own, &backend.id))
    };
    (name == backend.path || is_in_folder()) && file.bytes() == Some(backend.bytes)
}

/// Whether `own`, a name without its beginning, is of the object `id`: QEMU calls it so, or by its whole path with other letters for `/`.
fn is_named(own: &str, id: &str) -> bool {
    let rest = own.strip_prefix("_objects_").and_then(|own| own.strip_prefix(id)).or_else(|| own.strip_prefix(id));
    let is_random =
        |rest: &str| rest.len() == RANDOM_LETTERS && rest.bytes().all(|letter| letter.is_ascii_alphanumeric());
    rest.and_then(|rest| rest.strip_prefix('.')).is_some_and(is_random)
}

#[cfg(test)]
mod tests {
    use memory::Mapping;
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    const FOLDER: &str = "/dev/shm/vm";

    fn file(name: &str, number: u64, bytes: u64) -> MappedFile {
        let mappings = vec![Mapping { start: number << 40, end: (number << 40) + bytes, offset: 0 }];
        MappedFile { name: name.to_owned(), identity: ("0:1".to_owned(), number), mappings }
    }

    fn part(id: &str, path: &str, bytes: u64) -> SharedMemory {
        SharedMemory { id: id.to_owned(), path: path.to_owned(), bytes }
    }

    #[test]
    fn two_parts_of_one_size_in_one_folder_are_told_by_their_ids() {
        let files = [
            file("/dev/shm/vm/qemu_back_mem._objects_ram-node1.aB3dEf (deleted)", 1, 4096),
            file("/dev/shm/vm/qemu_back_mem._objects_ram-node0.Xy1234 (deleted)", 2, 4096),
        ];
        let parts = [part("ram-node0", FOLDER, 4096), part("ram-node1", FOLDER, 4096)];
        let found = find(&files, &parts).expect("each has its own");
        assert_eq!(found.iter().map(|file| file.identity.1).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn what_could_be_several_or_is_another_is_refused() {
        let one = |name: &str| find(&[file(name, 1, 4096)], &[part("ram", FOLDER, 4096)]);
        assert!(one("/dev/shm/vm/qemu_back_mem.ram.aB3dEf (deleted)").is_ok());
        for other in
            ["/dev/shm/vm/anything", "/dev/shm/vm/qemu_back_mem.ram2.aB3dEf", "/dev/shm/qemu_back_mem.ram.aB3dEf"]
        {
            assert!(one(other).is_err(), "{other}");
        }
        let twice = [
            file("/dev/shm/vm/qemu_back_mem.ram.aaaaaa", 1, 4096),
            file("/dev/shm/vm/qemu_back_mem.ram.bbbbbb", 2, 4096),
        ];
        assert!(find(&twice, &[part("ram", FOLDER, 4096)]).expect_err("which").contains("several"));
        let same = [part("ram", "/dev/shm/one", 4096), part("other", "/dev/shm/one", 4096)];
        assert!(find(&[file("/dev/shm/one", 1, 4096)], &same).is_err(), "one file is two parts");
    }

    proptest! {
        /// Ids that are parts of each other, in one folder and of few sizes, in any order, with files of others between.
        #[test]
        fn each_part_has_the_file_of_its_id_or_all_are_refused(
            ids in proptest::collection::btree_set("[ab.]{1,3}|_objects_a", 1..6),
            sizes in proptest::collection::vec(1_u64..3, 6),
            others in proptest::collection::vec("[ab.]{1,4}", 0..4),
            swaps in proptest::collection::vec((any::<Index>(), any::<Index>()), 8),
        ) {
            let mut files = Vec::new();
            let mut parts = Vec::new();
            for (number, (id, size)) in (1..).zip(ids.iter().zip(&sizes)) {
                files.push(file(&format!("{FOLDER}/qemu_back_mem._objects_{id}.Ra{number:04} (deleted)"), number, size * 4096));
                parts.push(part(id, FOLDER, size * 4096));
            }
            for (number, name) in (100..).zip(&others) {
                files.push(file(&format!("{FOLDER}/{name}"), number, 4096));
            }
            for (one, other) in &swaps {
                let (one, other) = (one.index(files.len()), other.index(files.len()));
                files.swap(one, other);
            }
            match find(&files, &parts) {
                Ok(found) => {
                    let found: Vec<u64> = found.iter().map(|file| file.identity.1).collect();
                    prop_assert_eq!(found, (1..=parts.len() as u64).collect::<Vec<_>>());
                }
                // Only where an id looks like the path of another one.
                Err(why) => prop_assert!(ids.contains("_objects_a") && ids.contains("a"), "{}", why),
            }
        }
    }
}
