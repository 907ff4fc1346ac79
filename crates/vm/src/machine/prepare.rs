//! What to change in a command line so that the machine's memory lies in a shared file, where it can be copied from outside.

use super::description::{Change, MachineDescription};
use super::words::{Pieces, parse};

const SHARED: &str = "QEMU's memory can be copied from outside only where it is a shared file";
/// What a memory without a backend is called.
const ID: &str = "transhume-ram";

impl MachineDescription {
    /// The options that differ, for a machine called `name` with `memory_bytes`, whose memory files are in `folder`; none if nothing is to
    /// be changed. Memory in huge pages has another folder.
    #[must_use]
    pub fn prepare_memory(&self, name: &str, memory_bytes: u64, folder: &str) -> Vec<Change> {
        let items = parse(&self.words);
        let mut changes = Vec::new();
        let mut has_backend = false;
        for item in items.iter().filter(|item| item.name() == "object") {
            let pairs = item.pairs();
            let get = |keys: &[&str]| {
                pairs.iter().find(|(key, _)| keys.contains(&key.as_str())).map(|(_, value)| value.as_str())
            };
            let Some(kind) = get(&["type", "qom-type"]).filter(|kind| kind.starts_with("memory-backend-")) else {
                continue;
            };
            has_backend = true;
            let is_shared = get(&["share"]).is_some_and(|share| ["on", "true", "yes"].contains(&share));
            if kind == "memory-backend-file" && is_shared {
                continue;
            }
            let (id, size) = (get(&["id"]).unwrap_or("ram"), get(&["size"]).unwrap_or_default());
            let own = format!("{folder}/{name}-{id}.ram");
            let path = get(&["mem-path"]).unwrap_or(&own);
            let to = format!("memory-backend-file,id={id},size={size},share=on,mem-path={path}");
            changes.push(change("-object", item.value(), &to));
        }
        if has_backend {
            return changes;
        }
        let backend = format!("memory-backend-file,id={ID},size={memory_bytes},share=on,mem-path={folder}/{name}.ram");
        changes.push(change("-object", "", &backend));
        let is_machine = |item: &&super::words::Item| ["machine", "M"].contains(&item.name());
        let (from, to) = match items.iter().find(is_machine) {
            Some(item) => {
                let mut pieces = Pieces::parse(item.value());
                pieces.set("memory-backend", ID);
                (item.value().to_owned(), pieces.join())
            }
            None => (String::new(), format!("memory-backend={ID}")),
        };
        changes.push(change("-machine", &from, &to));
        if let Some(item) = items.iter().find(|item| item.name() == "mem-path") {
            changes.push(change("-mem-path", item.value(), ""));
        }
        changes
    }
}

fn change(option: &str, from: &str, to: &str) -> Change {
    Change { option: option.to_owned(), from: from.to_owned(), to: to.to_owned(), why: SHARED.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(words: &[&str]) -> Vec<(String, String, String)> {
        let words = words.iter().map(|&word| word.to_owned()).collect();
        let description = MachineDescription { program: "qemu".to_owned(), words };
        let changes = description.prepare_memory("web1", 1 << 30, "/dev/shm");
        changes.into_iter().map(|change| (change.option, change.from, change.to)).collect()
    }

    #[test]
    fn a_memory_without_a_backend_gets_one() {
        let file = "memory-backend-file,id=transhume-ram,size=1073741824,share=on,mem-path=/dev/shm/web1.ram";
        let object = ("-object".to_owned(), String::new(), file.to_owned());
        let machine = |from: &str, to: &str| ("-machine".to_owned(), from.to_owned(), to.to_owned());
        assert_eq!(told(&["-m", "1024"]), [object.clone(), machine("", "memory-backend=transhume-ram")]);
        let changed = machine("q35,accel=kvm", "q35,accel=kvm,memory-backend=transhume-ram");
        assert_eq!(told(&["-machine", "q35,accel=kvm"]), [object, changed]);
    }

    #[test]
    fn a_backend_is_made_a_shared_file_and_one_that_is_stays() {
        assert_eq!(told(&["-object", "memory-backend-file,id=a,size=1G,share=on,mem-path=/dev/shm/a"]), []);
        let ram = "memory-backend-ram,id=a,size=1G";
        let file = "memory-backend-file,id=a,size=1G,share=on,mem-path=/dev/shm/web1-a.ram";
        assert_eq!(told(&["-object", ram]), [("-object".to_owned(), ram.to_owned(), file.to_owned())]);
    }
}
