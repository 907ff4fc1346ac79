//! `transhume volume snapshot` and `transhume volume layer`.

use std::time::{Duration, Instant};

use api::Client;
use api::v1::{
    Error, Layer, LayerChangeRequest, LayerKind, LayerRequest, LayerState, Result, RevertRequest, SnapshotRequest,
    Volume,
};

use crate::args::{LayerAddArgs, LayerCommand, LayerKindArg, SnapshotCommand};
use crate::path::absolute;
use crate::say::print;
use crate::{say, show};

/// How often the removal of a snapshot is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How often whoever waits for that is told how far it is.
const SAY_INTERVAL: Duration = Duration::from_secs(5);

/// Snapshots of a volume.
pub(crate) async fn snapshot(client: &Client, command: SnapshotCommand, json: bool) -> Result<()> {
    match command {
        SnapshotCommand::Add(args) => {
            let at = args.at.as_deref().map(absolute).transpose()?;
            let volume = client.add_snapshot(&args.name, &SnapshotRequest { snapshot: args.snapshot, at }).await?;
            print(json, &volume, || format!("{}: snapshot {} is taken", volume.name, newest_snapshot(&volume)))
        }
        SnapshotCommand::Ls(args) => {
            let layers = snapshots(client, &args.name).await?;
            print(json, &layers, || show::snapshots(&layers))
        }
        SnapshotCommand::Rm(args) => {
            let volume = client.remove_snapshot(&args.name, &args.snapshot).await?;
            if args.detach {
                return print(json, &volume, || format!("{}: snapshot {} is being removed", args.name, args.snapshot));
            }
            wait_until_removed(client, &args.name, &args.snapshot).await?;
            let volume = client.volume(&args.name).await?;
            print(json, &volume, || format!("{}: snapshot {} is removed", args.name, args.snapshot))
        }
        SnapshotCommand::Revert(args) => {
            let request = RevertRequest { snapshot: args.snapshot, discard_newer: args.discard_newer };
            let volume = client.revert(&args.name, &request).await?;
            print(json, &volume, || format!("{} is as it was at snapshot {}", args.name, newest_snapshot(&volume)))
        }
    }
}

fn newest_snapshot(volume: &Volume) -> &str {
    let newest = volume.layers.iter().rev().find(|layer| layer.kind == LayerKind::Overlay);
    newest.map_or("", |layer| &layer.name)
}

async fn snapshots(client: &Client, name: &str) -> Result<Vec<Layer>> {
    let mut layers = client.layers(name).await?;
    layers.retain(|layer| layer.kind == LayerKind::Overlay);
    Ok(layers)
}

async fn wait_until_removed(client: &Client, name: &str, snapshot: &str) -> Result<()> {
    let mut said = Instant::now();
    loop {
        let layers = snapshots(client, name).await?;
        let is_there = |layer: &&Layer| layer.name == snapshot && layer.state == LayerState::Draining;
        let Some(layer) = layers.iter().find(is_there) else { return Ok(()) };
        if said.elapsed() >= SAY_INTERVAL {
            let held = show::bytes(layer.held_bytes.unwrap_or_default());
            say::aside(&format!("{name}: {held} of snapshot {snapshot} are still to be moved"));
            said = Instant::now();
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Layers of a volume.
pub(crate) async fn layer(client: &Client, command: LayerCommand, json: bool) -> Result<()> {
    match command {
        LayerCommand::Add(args) => {
            let volume = client.add_layer(&args.name, &layer_request(&args)?).await?;
            print(json, &volume, || show::layers(&volume.layers))
        }
        LayerCommand::Set(args) => {
            let (mode, size_bytes) = (args.mode.map(Into::into), args.size.map(|size| size.0));
            let request = LayerChangeRequest { mode, size_bytes };
            let volume = client.change_layer(&args.name, &args.layer, &request).await?;
            print(json, &volume, || show::layers(&volume.layers))
        }
        LayerCommand::Ls(args) => {
            let layers = client.layers(&args.name).await?;
            print(json, &layers, || show::layers(&layers))
        }
        LayerCommand::Rm(args) => {
            let volume = match args.discard_dirty {
                true => client.discard_layer(&args.name, &args.layer).await?,
                false => client.remove_layer(&args.name, &args.layer).await?,
            };
            if args.detach {
                return print(json, &volume, || show::layers(&volume.layers));
            }
            let draining = volume.layers.iter().find(|layer| is_leaving(layer));
            if let Some(leaving) = draining {
                wait_until_emptied(client, &args.name, &leaving.id).await?;
            }
            let volume = client.volume(&args.name).await?;
            print(json, &volume, || show::layers(&volume.layers))
        }
    }
}

/// Whether a layer is a cache or a surrogate that is being taken out.
fn is_leaving(layer: &Layer) -> bool {
    matches!(layer.kind, LayerKind::Cache | LayerKind::Redirect) && layer.state == LayerState::Draining
}

/// Waits until `id` is no layer any more.
async fn wait_until_emptied(client: &Client, name: &str, id: &str) -> Result<()> {
    let mut said = Instant::now();
    loop {
        let layers = client.layers(name).await?;
        let Some(layer) = layers.iter().find(|layer| layer.id == id) else { return Ok(()) };
        if said.elapsed() >= SAY_INTERVAL {
            let held = show::bytes(layer.held_bytes.unwrap_or_default());
            say::aside(&format!("{name}: {held} of {} are still to be moved", layer.name));
            said = Instant::now();
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// The layer that is asked for. An option of another kind is refused, and not ignored.
fn layer_request(args: &LayerAddArgs) -> Result<LayerRequest> {
    let of_throttle = args.iops.is_some() || args.bandwidth.is_some();
    let sizes = [args.size.is_some(), args.block.is_some(), args.sequential.is_some()];
    let of_cache = args.cache.is_some() || args.mode.is_some() || args.policy.is_some() || sizes.contains(&true);
    // Its other options need its name.
    let of_surrogate = args.surrogate.is_some();
    match args.kind {
        LayerKindArg::Throttle if of_cache || of_surrogate => Err(Error::invalid(
            "a throttle has --iops and --bandwidth",
            "the other options are of a cache or a surrogate",
        )),
        LayerKindArg::Throttle => {
            let bytes_per_second = args.bandwidth.map(|rate| rate.0);
            Ok(LayerRequest::Throttle { iops: args.iops, bytes_per_second })
        }
        _ if of_throttle => Err(Error::invalid("--iops and --bandwidth are of a throttle", "add one beside the layer")),
        LayerKindArg::Cache if of_surrogate => {
            Err(Error::invalid("--surrogate is of a surrogate", "a volume has a cache or a surrogate"))
        }
        LayerKindArg::Cache => cache_request(args),
        LayerKindArg::Surrogate if of_cache => {
            Err(Error::invalid("a surrogate has none of the options of a cache", "give --surrogate NAME"))
        }
        LayerKindArg::Surrogate => {
            let missing = || {
                let hint = "give --surrogate NAME; `transhume surrogate ls` lists those that there are";
                Error::invalid("which surrogate of the host is to serve the volume is not said", hint)
            };
            Ok(LayerRequest::Surrogate {
                surrogate: args.surrogate.clone().ok_or_else(missing)?,
                popular_threshold: args.popular_threshold,
                surrogate_on_flash: args.surrogate_on_flash,
                sole_copy: args.sole_copy,
            })
        }
    }
}

fn cache_request(args: &LayerAddArgs) -> Result<LayerRequest> {
    let (Some(cache), Some(size)) = (args.cache.clone(), args.size) else {
        return Err(Error::invalid(
            "a volume's cache is on a cache of the host, and has a size",
            "give --cache NAME and --size SIZE; `transhume cache ls` lists those that there are",
        ));
    };
    Ok(LayerRequest::Cache {
        cache,
        size_bytes: size.0,
        mode: args.mode.map(Into::into),
        policy: args.policy.map(Into::into),
        block_bytes: args.block.map(|size| size.0),
        sequential_bytes: args.sequential,
    })
}
