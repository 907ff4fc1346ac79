//! The monitor of a libvirt domain: one of its own that libvirt does not use, or libvirt's.

use std::path::PathBuf;
use std::sync::Arc;

use env::EnvRef;
use vm::{LibvirtDomain, Qmp, Virsh};

use crate::hypervisor::Monitors;

/// Over a monitor of the domain's own that libvirt does not use, if there is one that answers; through libvirt
/// otherwise.
pub(crate) async fn connect_to_domain(
    xml: &str,
    domain: &LibvirtDomain,
    (monitors, env): (&Monitors, &EnvRef),
) -> vm::Result<Qmp> {
    if !domain.is_running {
        let context = format!("the libvirt domain {} does not run", domain.name);
        return Err(vm::Error::new(vm::ErrorKind::NoMonitor, context));
    }
    if let Some(path) = second_monitor(xml) {
        match monitors.connect(&path, env).await {
            Ok(qmp) => return Ok(qmp),
            Err(error) => tracing::info!(domain = domain.name, %error, "libvirt is asked instead"),
        }
    }
    Qmp::through_libvirt(Virsh::default(), domain, Arc::clone(env)).await
}

/// The XML of a libvirt domain as it runs.
pub(crate) async fn domain_xml(domain: &str) -> vm::Result<String> {
    let output = Virsh::default().run(&["dumpxml", "--security-info", "--", domain]).await;
    output.map_err(|error| vm::Error::new(error.kind(), format!("the libvirt domain {domain}")).with_source(error))
}

/// The socket of a `-qmp unix:PATH,...` in the domain's `<qemu:commandline>`.
fn second_monitor(xml: &str) -> Option<PathBuf> {
    let arguments: Vec<&str> = xml
        .split("<qemu:arg")
        .skip(1)
        .filter_map(|rest| {
            let value = rest.split_once("value=")?.1;
            let quote = value.chars().next().filter(|quote| ['\'', '"'].contains(quote))?;
            value[1..].split(quote).next()
        })
        .collect();
    arguments.windows(2).find_map(|pair| {
        let is_monitor = matches!(pair[0], "-qmp" | "--qmp");
        let path = pair[1].strip_prefix("unix:").filter(|_| is_monitor)?;
        Some(PathBuf::from(path.split(',').next()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_monitor_of_a_domain_is_found() {
        let xml = "<domain><qemu:commandline>\n<qemu:arg value='-qmp'/>\n\
                   <qemu:arg value='unix:/run/transhume-web1.qmp,server=on,wait=off'/></qemu:commandline></domain>";
        assert_eq!(second_monitor(xml), Some(PathBuf::from("/run/transhume-web1.qmp")));
        assert_eq!(second_monitor("<domain/>"), None);
        assert_eq!(second_monitor("<qemu:arg value='-m'/><qemu:arg value='unix:/x'/>"), None);
    }
}
