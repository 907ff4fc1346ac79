//! `transhume cache`.

use api::Client;
use api::v1::{CacheRequest, CacheResizeRequest, Result};

use crate::args::CacheCommand;
use crate::say::print;
use crate::show;
use crate::store::store_request;

/// Caches of this host.
pub(crate) async fn cache(client: &Client, command: CacheCommand, json: bool) -> Result<()> {
    match command {
        CacheCommand::Create(args) => {
            let (store, policy) = (store_request(&args.store)?, args.policy.map(Into::into));
            let cache = client.create_cache(&CacheRequest { name: args.name, store, policy }).await?;
            print(json, &cache, || format!("cache {} is ready\n{}", cache.name, show::cache(&cache)))
        }
        CacheCommand::Ls => {
            let caches = client.caches().await?;
            print(json, &caches, || show::caches(&caches))
        }
        CacheCommand::Show(args) => {
            let cache = client.cache(&args.name).await?;
            print(json, &cache, || show::cache(&cache))
        }
        CacheCommand::Resize(args) => {
            let request = CacheResizeRequest { size_bytes: args.size.map(|size| size.0) };
            let cache = client.resize_cache(&args.name, &request).await?;
            print(json, &cache, || show::cache(&cache))
        }
        CacheCommand::Drain(args) => {
            let cache = client.drain_cache(&args.name).await?;
            print(json, &cache, || format!("the backends have all that was written before\n{}", show::cache(&cache)))
        }
        CacheCommand::Rm(args) => {
            let cache = client.remove_cache(&args.name).await?;
            print(json, &cache, || format!("cache {} is removed", cache.name))
        }
    }
}
