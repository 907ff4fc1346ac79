//! The daemon's layers, and the imports that break the rules today.

/// The crate whose modules lie in layers.
pub(super) const LAYERED: &str = "daemon";

/// Its layers, the lowest first, with their modules. A module names its own layer and those below it.
pub(super) const LAYERS: &[(&str, &[&str])] = &[
    (
        "platform",
        &[
            "arbiter",
            "args",
            "audit",
            "clients",
            "config",
            "descriptors",
            "device_identity",
            "disk",
            "file_limit",
            "free_space",
            "gauge",
            "handed_over",
            "hooks",
            "hosts",
            "hypervisor",
            "log",
            "places",
            "platform",
            "problem",
            "reject_all",
            "sockets",
            "state_dir",
            "workers",
        ],
    ),
    ("store", &["document", "journal", "journal_file", "location"]),
    (
        "volume",
        &[
            "caches",
            "foreign",
            "last_life",
            "lent_parts",
            "listeners",
            "loss_record",
            "open_backend",
            "overlays",
            "pools",
            "stack",
            "surrogates",
            "volume",
        ],
    ),
    ("job", &["adopt", "cold", "job_control", "jobs", "persist", "rates"]),
    ("between hosts", &["machines", "remote"]),
    (
        "API",
        &[
            "accept",
            "core",
            "daemon",
            "http",
            "letting_go",
            "metrics",
            "recover",
            "reload",
            "rescue",
            "run",
            "separate",
        ],
    ),
];

/// An import that runs up, or closes a circle, and is there all the same.
pub(super) struct Known {
    /// The crate's folder.
    pub(super) krate: &'static str,
    pub(super) from: &'static str,
    pub(super) to: &'static str,
    /// Why it is still there.
    pub(super) reason: &'static str,
}

const fn known(krate: &'static str, from: &'static str, to: &'static str, reason: &'static str) -> Known {
    Known { krate, from, to, reason }
}

/// All of them. This list only gets shorter: what is new is written without a circle.
pub(super) const KNOWN: &[Known] = &[
    known("backends", "target", "file", "a target is opened by the backend that its preparation is a part of"),
    known("daemon", "adopt", "daemon", "takes the whole daemon where a part of it would do"),
    known("daemon", "adopt", "jobs", "a watch over an adopted disk asks for the moves of its volume"),
    known("daemon", "foreign", "daemon", "takes the whole daemon where a part of it would do"),
    known("daemon", "hosts", "rates", "the network hands on what the cards of this host count"),
    known("daemon", "job_control", "daemon", "takes the whole daemon where a part of it would do"),
    known("daemon", "jobs", "daemon", "takes the whole daemon where a part of it would do"),
    known("daemon", "jobs", "remote", "a move to another host prepares its own target"),
    known("daemon", "location", "foreign", "a place is read from text by the module of its kind"),
    known("daemon", "machines", "daemon", "takes the whole daemon where a part of it would do"),
    known("daemon", "open_backend", "foreign", "an export of somebody else is opened like a file"),
    known("daemon", "open_backend", "remote", "a volume at another host is opened like a file"),
    known("daemon", "overlays", "daemon", "takes the whole daemon where a part of it would do"),
    known("daemon", "overlays", "volume", "an overlay's places are those of its volume, which holds the overlays"),
    known("daemon", "persist", "daemon", "takes the whole daemon where a part of it would do"),
    known("daemon", "platform", "open_backend", "the real platform opens backends itself"),
    known("daemon", "platform", "hosts", "the seam to other hosts speaks of their names and of whom they receive"),
    known("daemon", "rates", "daemon", "takes the whole daemon where a part of it would do"),
    known("daemon", "rates", "jobs", "who shares the bandwidth is asked of the moves"),
    known("daemon", "rates", "remote", "a rate is set on the connection of a move"),
    known("daemon", "remote", "daemon", "takes the whole daemon where a part of it would do"),
    known("daemon", "volume", "jobs", "a volume holds the handle of its move"),
    known("daemon", "volume", "remote", "a volume holds its connection to another host"),
    known("daemon", "stack", "daemon", "takes the whole daemon where a part of it would do"),
    known("daemon", "stack", "volume", "a layer is inserted into the volume that holds the stack"),
    known("guest", "acceleration", "initramfs", "whether a guest can be accelerated is tried with a guest"),
    known("migrate", "context", "strategy", "a migration's context holds the store of its strategy's snapshots"),
    known(
        "migrate",
        "driver",
        "migration",
        "where a driver enters, and what a target must be, stand beside the start of a migration",
    ),
    known("sim", "host", "checks", "what a host has stored is checked where it is stored"),
    known("sim", "inflight_write", "disk", "a write under way is a part of the disk, in a file of its own"),
    known("sim", "scenario", "scenario_dsl", "a scenario is told, and taken from what is told, in one vocabulary"),
    known("sim", "scenario", "scenario_runner", "a scenario plays itself"),
    known(
        "vm",
        "qmp",
        "options",
        "a monitor may be reached through a domain of libvirt, which is an option of adoptions",
    ),
];
