//! The operator's program that is run at each phase of a VM's move: how it is checked and run. When it is run is the business
//! of `machines`.

mod program;

use std::path::Path;

use api::v1::{Error, ErrorCode};
use futures::future::BoxFuture;

use crate::problem::Result;

pub(crate) use program::HookPrograms;

/// What a hook has left.
pub use vm::RunOutput as HookOutput;

/// What runs hooks. A hook whose future is dropped is ended, with what it has started.
pub trait Hooks: Send + Sync {
    /// Refuses a program that others than root may replace.
    ///
    /// # Errors
    /// What is wrong with it, and what to do.
    fn check(&self, program: &Path) -> Result<()>;

    /// Runs `program` with `arguments` and `input` on its standard input, however long it takes.
    fn run<'a>(
        &'a self,
        program: &'a Path,
        arguments: &'a [String],
        input: &'a str,
    ) -> BoxFuture<'a, std::io::Result<HookOutput>>;
}

/// A host without hooks.
pub struct NoHooks;

impl Hooks for NoHooks {
    fn check(&self, program: &Path) -> Result<()> {
        let message = format!("this host runs no hook {}", program.display());
        Err(Error::new(ErrorCode::ConfigInvalid, message).with_hint("take `vm-hook` out of its configuration"))
    }

    fn run<'a>(&'a self, _: &'a Path, _: &'a [String], _: &'a str) -> BoxFuture<'a, std::io::Result<HookOutput>> {
        Box::pin(async { Err(std::io::ErrorKind::Unsupported.into()) })
    }
}
