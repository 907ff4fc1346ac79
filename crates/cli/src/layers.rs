//! `transhume volume snapshot` and `transhume volume layer`.

use std::time::{Duration, Instant};

use api::Client;
use api::v1::{Layer, LayerKind, LayerRequest, LayerState, Result, RevertRequest, SnapshotRequest, Volume};

use crate::args::{LayerCommand, LayerKindArg, SnapshotCommand};
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
            let LayerKindArg::Throttle = args.kind;
            let bytes_per_second = args.bandwidth.map(|rate| rate.0);
            let request = LayerRequest::Throttle { iops: args.iops, bytes_per_second };
            let volume = client.add_layer(&args.name, &request).await?;
            print(json, &volume, || show::layers(&volume.layers))
        }
        LayerCommand::Ls(args) => {
            let layers = client.layers(&args.name).await?;
            print(json, &layers, || show::layers(&layers))
        }
        LayerCommand::Rm(args) => {
            let volume = client.remove_layer(&args.name, &args.layer).await?;
            print(json, &volume, || show::layers(&volume.layers))
        }
    }
}
