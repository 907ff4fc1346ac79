//! The processes that a daemon has for its devices.

/// The helpers of the process `pid`.
pub(crate) fn helpers_of(pid: u32) -> Vec<u32> {
    let children = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
    let children = children.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> = children.flat_map(|line| numbers(&line)).collect();
    children.into_iter().filter(|child| name_of(*child) == "transhume-sync").collect()
}

fn numbers(line: &str) -> Vec<u32> {
    line.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// What a process calls itself; nothing once it has ended.
pub(crate) fn name_of(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}
