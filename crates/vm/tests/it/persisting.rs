//! The configuration hook, with a `virsh` of the test's own and real scripts.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use futures::future::BoxFuture;
use transhume_vm::{
    ErrorKind, Moved, Persist, PersistOutcome, RunOutput, Runner, SystemRunner, persist, rewrite_domain,
};

const XML: &str = "<domain type='kvm'>
  <name>web</name>
  <!-- a comment that stays -->
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw' cache='none'/>
      <source file='/old/a&amp;b.raw' index='2'>
        <seclabel model='dac' relabel='no'/>
      </source>
      <target dev='vda' bus='virtio'/>
    </disk>
    <disk type='file' device='disk'>
      <source file='/old/other.raw'/>
      <target dev='vdb' bus='virtio'/>
    </disk>
  </devices>
</domain>
";

fn moved() -> Moved {
    Moved {
        volume: "web".to_owned(),
        source: PathBuf::from("/old/a&b.raw"),
        target: PathBuf::from("/new/c&d.raw"),
        format: "raw".to_owned(),
        node: "disk0".to_owned(),
        device: "vda".to_owned(),
        process_id: Some(4711),
        target_is_block_device: false,
    }
}

#[test]
fn only_the_moved_disk_is_rewritten_and_everything_else_stays_as_it_was() {
    let rewritten = rewrite_domain(XML, Path::new("/old/a&b.raw"), Path::new("/new/c&d.raw"), false).expect("XML");
    assert_eq!(rewritten.changed, 1);
    let old = "<source file='/old/a&amp;b.raw' index='2'>";
    let new = "<source file=\"/new/c&amp;d.raw\" index=\"2\">";
    let expected = XML.replace(old, new);
    assert_eq!(
        rewritten.xml.replacen("<disk type=\"file\" device=\"disk\">", "<disk type='file' device='disk'>", 1),
        expected
    );
    let again =
        rewrite_domain(&rewritten.xml, Path::new("/old/a&b.raw"), Path::new("/new/c&d.raw"), false).expect("XML");
    assert_eq!((again.changed, again.already), (0, 1));
    assert_eq!(again.xml, rewritten.xml);
}

#[test]
fn a_disk_that_moves_to_a_block_device_changes_its_type() {
    let rewritten = rewrite_domain(XML, Path::new("/old/other.raw"), Path::new("/dev/vg/lv"), true).expect("XML");
    assert!(rewritten.xml.contains("<disk type=\"block\" device=\"disk\">"), "{}", rewritten.xml);
    assert!(rewritten.xml.contains("<source dev=\"/dev/vg/lv\"/>"), "{}", rewritten.xml);
    assert!(rewritten.xml.contains("a comment that stays"));
}

/// Prints the XML, takes the new one.
#[derive(Default)]
struct Virsh {
    xml: Mutex<String>,
    fails: bool,
}

impl Runner for Virsh {
    fn run<'a>(
        &'a self,
        program: &'a Path,
        arguments: &'a [String],
        _: &'a [(String, String)],
        stdin: &'a str,
    ) -> BoxFuture<'a, io::Result<RunOutput>> {
        assert_eq!(program, Path::new("virsh"));
        let mut xml = self.xml.lock().expect("no panic");
        let mut output = RunOutput { success: !self.fails, ..RunOutput::default() };
        match arguments[0].as_str() {
            _ if self.fails => output.stderr = "error: failed to get domain 'web'\n".to_owned(),
            "dumpxml" => {
                assert!(arguments.contains(&"--inactive".to_owned()), "the running definition is not the next start's");
                output.stdout.clone_from(&xml);
            }
            "define" => stdin.clone_into(&mut xml),
            other => panic!("virsh {other}"),
        }
        Box::pin(async { Ok(output) })
    }
}

#[tokio::test]
async fn a_libvirt_domain_names_the_new_place_and_the_hook_may_run_twice() {
    let virsh = Virsh { xml: Mutex::new(XML.to_owned()), fails: false };
    let how = Persist::Libvirt { domain: "web".to_owned() };
    let outcome = persist(&how, &moved(), &virsh).await.expect("it runs");
    assert!(matches!(outcome, PersistOutcome::Done { .. }), "{outcome:?}");
    assert!(virsh.xml.lock().expect("no panic").contains("/new/c&amp;d.raw"));
    assert_eq!(persist(&how, &moved(), &virsh).await.expect("it runs"), PersistOutcome::AlreadyDone);
    let strange = Moved { source: "/nosuch".into(), target: "/else".into(), ..moved() };
    let error = persist(&how, &strange, &virsh).await.expect_err("no such disk");
    assert_eq!(error.kind(), ErrorKind::Hook);
    assert!(error.to_string().contains("virsh edit"), "{error}");
}

#[tokio::test]
async fn what_virsh_says_is_said() {
    let virsh = Virsh { fails: true, ..Virsh::default() };
    let error = persist(&Persist::Libvirt { domain: "web".to_owned() }, &moved(), &virsh).await.expect_err("it fails");
    assert_eq!(error.kind(), ErrorKind::Hook);
    assert!(error.to_string().contains("failed to get domain 'web'"), "{error}");
}

/// Writes a script. A process of its own does so: another test's child could hold a file that this one writes open, and the kernel
/// runs no program that is open for writing.
fn write_script(path: &std::path::Path, text: &str) {
    let write = ["-c", "printf %s \"$2\" > \"$1\" && chmod 755 \"$1\"", "sh"];
    let written = std::process::Command::new("sh").args(write).arg(path).arg(text).status().expect("sh runs");
    assert!(written.success(), "the script is not written");
}

#[tokio::test]
async fn a_script_gets_what_has_moved_in_its_environment_and_its_failure_is_the_hooks() {
    let directory = tempfile::tempdir().expect("a directory");
    let script = directory.path().join("hook");
    let seen = directory.path().join("seen");
    let write = |text: &str| {
        write_script(&script, text);
    };
    write(&format!("#!/bin/sh\nenv | grep ^TRANSHUME_ | sort > {}\n", seen.display()));
    let how = Persist::Script { program: script.clone() };
    persist(&how, &moved(), &SystemRunner::default()).await.expect("it runs");
    let seen = std::fs::read_to_string(&seen).expect("it has run");
    let expected = "TRANSHUME_DEVICE=vda\nTRANSHUME_FORMAT=raw\nTRANSHUME_NODE=disk0\nTRANSHUME_QEMU_PID=4711\n\
        TRANSHUME_SOURCE=/old/a&b.raw\nTRANSHUME_TARGET=/new/c&d.raw\nTRANSHUME_TARGET_KIND=file\nTRANSHUME_VOLUME=web\n";
    assert_eq!(seen, expected);
    write("#!/bin/sh\necho no such VM >&2\nexit 3\n");
    let error = persist(&how, &moved(), &SystemRunner::default()).await.expect_err("it failed");
    assert_eq!(error.kind(), ErrorKind::Hook);
    assert!(error.to_string().contains("no such VM"), "{error}");
    let none = Persist::Script { program: directory.path().join("nosuch") };
    assert_eq!(
        persist(&none, &moved(), &SystemRunner::default()).await.expect_err("no script").kind(),
        ErrorKind::Hook
    );
    assert_eq!(
        persist(&Persist::No, &moved(), &SystemRunner::default()).await.expect("nothing to do"),
        PersistOutcome::Skipped
    );
}

#[tokio::test]
async fn a_script_that_does_not_end_is_killed_with_all_that_it_has_started() {
    let directory = tempfile::tempdir().expect("a directory");
    let script = directory.path().join("hook");
    let child = directory.path().join("child");
    let write = |last: &str| {
        let text = format!("#!/bin/sh\nsleep 1000 &\necho $! > {}\n{last}\n", child.display());
        write_script(&script, text.as_ref());
    };
    // One that was killed stays in the table of processes until whoever inherits it looks.
    let is_alive = || {
        let pid = std::fs::read_to_string(&child).expect("it has run");
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") Z ")
    };
    let is_gone_soon = || {
        (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            !is_alive()
        })
    };
    let how = Persist::Script { program: script.clone() };

    // What it leaves behind keeps its output open: that is not waited for.
    write("exit 0");
    persist(&how, &moved(), &SystemRunner::default()).await.expect("it has ended well");
    assert!(is_gone_soon(), "what the script has left running goes on");

    write("wait");
    let runner = SystemRunner { limit: Duration::from_millis(500), ..SystemRunner::default() };
    let error = persist(&how, &moved(), &runner).await.expect_err("it never ends");
    assert!(error.kind() == ErrorKind::Hook && error.to_string().contains("was killed"), "{error}");
    assert!(is_gone_soon(), "what the script has started goes on");
}
