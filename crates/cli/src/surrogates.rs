//! `transhume surrogate`.

use std::time::{Duration, Instant};

use api::Client;
use api::v1::{Error, ErrorCode, Result, Surrogate, SurrogateRepairRequest, SurrogateRequest};

use crate::args::SurrogateCommand;
use crate::say::print;
use crate::store::store_request;
use crate::{say, show};

/// How often a repair is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How often whoever waits for that is told how far it is.
const SAY_INTERVAL: Duration = Duration::from_secs(5);

/// Surrogates of this host.
pub(crate) async fn surrogate(client: &Client, command: SurrogateCommand, json: bool) -> Result<()> {
    match command {
        SurrogateCommand::Create(args) => {
            let stores = args.store.iter().map(|store| store_request(store)).collect::<Result<Vec<_>>>()?;
            let (partition_bytes, chunk_bytes) = (args.partition.map(|size| size.0), args.chunk.map(|size| size.0));
            let request = SurrogateRequest { name: args.name, stores, partition_bytes, chunk_bytes };
            let surrogate = client.create_surrogate(&request).await?;
            print(json, &surrogate, || {
                format!("surrogate {} is ready\n{}", surrogate.name, show::surrogate(&surrogate))
            })
        }
        SurrogateCommand::Ls => {
            let surrogates = client.surrogates().await?;
            print(json, &surrogates, || show::surrogates(&surrogates))
        }
        SurrogateCommand::Show(args) => {
            let surrogate = client.surrogate(&args.name).await?;
            print(json, &surrogate, || show::surrogate(&surrogate))
        }
        SurrogateCommand::Drain(args) => {
            let surrogate = client.drain_surrogate(&args.name).await?;
            print(json, &surrogate, || drained(&surrogate))
        }
        SurrogateCommand::Repair(args) => {
            let store = args.store.as_deref().map(store_request).transpose()?;
            let begun = client.repair_surrogate(&args.name, &SurrogateRepairRequest { store }).await?;
            let surrogate = if args.detach { begun } else { wait_until_repaired(client, &args.name).await? };
            print(json, &surrogate, || show::surrogate(&surrogate))
        }
        SurrogateCommand::Rm(args) => {
            let surrogate = client.remove_surrogate(&args.name).await?;
            print(json, &surrogate, || format!("surrogate {} is removed", surrogate.name))
        }
    }
}

/// Waits until nothing is copied to a store any more.
async fn wait_until_repaired(client: &Client, name: &str) -> Result<Surrogate> {
    let mut said = Instant::now();
    loop {
        let surrogate = client.surrogate(name).await?;
        let left: Vec<u64> = surrogate.partitions.iter().filter_map(|part| part.rebuild_left_bytes).collect();
        if left.is_empty() {
            return match surrogate.partitions.iter().find(|part| part.lost_store.is_some()) {
                None => Ok(surrogate),
                Some(part) => Err(Error::new(
                    ErrorCode::BackendUnusable,
                    format!("the part that {} has of the surrogate {name} is in one store still", part.volume),
                )
                .with_hint("the daemon's log says why; bring the volume up if it is down, and repair it again")),
            };
        }
        if said.elapsed() >= SAY_INTERVAL {
            say::aside(&format!("{name}: {} are still to be copied", show::bytes(left.iter().sum())));
            said = Instant::now();
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

fn drained(surrogate: &Surrogate) -> String {
    let rest = match surrogate.partitions.len() {
        0 => "none has: `transhume surrogate rm` removes it".to_owned(),
        parts => format!("{parts} still in use until those moves are over"),
    };
    format!("surrogate {} gives no further volume a part; {rest}", surrogate.name)
}
