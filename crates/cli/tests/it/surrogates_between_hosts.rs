//! A surrogate whose store is a volume of another host.

use crate::support::load::Load;
use crate::support::pair::{Pair, wait_until};
use crate::support::{same, target};
use serde_json::Value;

#[test]
fn a_volume_of_another_host_is_a_store_that_survives_cuts_and_deaths_of_either_daemon() {
    let mut pair = Pair::new();
    let of_store = pair.b.image("store.img", 64 << 20, 65536);
    pair.b.attach("fast", &of_store);
    let image = pair.a.image("disk.img", 24 << 20, 65536);
    let uri = pair.a.attach("x", &image);
    let create = |name: &str, store: &str| {
        ["surrogate", "create", name, "--partition", "32MiB", "--store", store].map(str::to_owned)
    };
    let refused = |name: &str, store: &str, code, part: &str| {
        let words = create(name, store);
        pair.a.refused(&words.each_ref().map(String::as_str), code, part);
    };
    refused("far", "nowhere:fast", 50, "nowhere");
    refused("far", "b:nothing", 5, "nothing");
    let busy_image = pair.b.image("busy.img", 4 << 20, 65536);
    let busy = Load::start(&pair.b.attach("busy", &busy_image), &busy_image, 791);
    busy.goes_on();
    refused("far", "b:busy", 8, "busy has clients");
    busy.finish();

    let made = pair.a.json(&create("far", "b:fast").each_ref().map(String::as_str));
    assert_eq!((&made["stores"][0]["place"], &made["bytes"]), (&"b:fast".into(), &(64 << 20).into()), "{made}");
    refused("other", "b:fast", 6, "is a store of a surrogate already");
    let load = Load::start(&uri, &image, 790);
    let add = ["volume", "layer", "add", "x", "surrogate", "--surrogate", "far"];
    pair.a.json(&[&add[..], &["--surrogate-on-flash", "--sole-copy"]].concat());
    load.goes_on();
    for round in 0..3 {
        match round {
            0 => {
                pair.network.cut();
                pair.network.mend();
            }
            1 => {
                pair.b.kill();
                pair.b.start();
            }
            _ => {
                pair.a.kill();
                pair.a.start();
            }
        }
        load.goes_on();
        let shown = pair.a.json(&["surrogate", "show", "far"]);
        let dirty = shown["partitions"][0]["redirection"]["places_dirty"].as_u64();
        assert!(dirty > Some(0), "nothing is redirected: {shown}\n{}", pair.a.log());
    }
    let to = pair.a.path("new.img");
    let report = pair.a.json(&["move", "x", "--to", &target(&to), "--surrogate", "far", "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}\n{}", pair.a.log());
    let parts = || pair.a.json(&["surrogate", "show", "far"])["partitions"].clone();
    wait_until("the surrogate is given back", || (parts() == Value::Array(Vec::new())).then_some(()));
    load.goes_on();
    pair.a.json(&["surrogate", "rm", "far"]);
    let expected = load.finish();
    pair.a.json(&["volume", "detach", "x"]);
    same(&to, &expected);
    assert_eq!(
        pair.b.json(&["volume", "show", "fast"])["name"],
        "fast",
        "what is another host's is not ours to remove"
    );
}
