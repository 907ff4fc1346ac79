//! `transhume surrogate`.

use api::Client;
use api::v1::{Result, Surrogate, SurrogateRequest};

use crate::args::SurrogateCommand;
use crate::say::print;
use crate::show;
use crate::store::store_request;

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
        SurrogateCommand::Rm(args) => {
            let surrogate = client.remove_surrogate(&args.name).await?;
            print(json, &surrogate, || format!("surrogate {} is removed", surrogate.name))
        }
    }
}

fn drained(surrogate: &Surrogate) -> String {
    let rest = match surrogate.partitions.len() {
        0 => "none has: `transhume surrogate rm` removes it".to_owned(),
        parts => format!("{parts} still in use until those moves are over"),
    };
    format!("surrogate {} gives no further volume a part; {rest}", surrogate.name)
}
