//! What libvirt's client and daemon say to each other, as far as a migration between two hosts must know it.
//!
//! A message begins with its length and six numbers, big-endian: the program, its version, the procedure, the kind, the serial
//! number and the status. The numbers of procedures are libvirt's stable interface (`remote_protocol.x`).
//!
//! ```text
//!            the source's daemon                            the target's
//!   virsh ── gate ──▶ libvirt here     virsh ═══ carried ═══ filter ──▶ libvirt there
//!              │ Confirm waits here until it is known              │ only what a migration asks
//!              │ whether the move counts
//! ```

use std::io::{Error, ErrorKind, Result};

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;

/// The longest message of libvirt, its length included.
const MESSAGE_BYTES_MAX: usize = (32 << 20) + 4;
/// Length and header.
const HEAD_BYTES: usize = 28;

const REMOTE_PROGRAM: u32 = 0x2000_8086;
const KEEPALIVE_PROGRAM: u32 = 0x6b65_6570;

/// What a client asks of the libvirt that a domain comes to: open, close, host name, features, authentication, URI, version,
/// Prepare, Finish, and being told that the connection ends.
const OF_A_TARGET: [u32; 11] = [1, 2, 59, 60, 66, 110, 157, 303, 306, 360, 361];
/// Confirm, in both forms: its last number says whether the migration was cancelled.
const CONFIRM: [u32; 2] = [218, 307];
/// Earlier protocols of migration, which end without Confirm.
const WITHOUT_CONFIRM: [u32; 5] = [61, 62, 63, 108, 109];

/// What becomes of a domain that libvirt has brought to the other host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nobody knows yet.
    Open,
    /// It is the other host's: libvirt ends it here.
    Away,
    /// It goes on here.
    Here,
}

struct Message(Vec<u8>);

impl Message {
    /// The next message; none if the other side is done.
    async fn read(from: &mut (impl AsyncRead + Unpin)) -> Result<Option<Self>> {
        let length = match from.read_u32().await {
            Ok(length) => length as usize,
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        };
        if !(HEAD_BYTES..=MESSAGE_BYTES_MAX).contains(&length) {
            return Err(Error::new(ErrorKind::InvalidData, format!("a message of libvirt has {length} bytes")));
        }
        let mut bytes = vec![0; length];
        bytes[..4].copy_from_slice(&u32::try_from(length).unwrap_or_default().to_be_bytes());
        from.read_exact(&mut bytes[4..]).await?;
        Ok(Some(Self(bytes)))
    }

    fn number(&self, at: usize) -> u32 {
        let mut number = [0; 4];
        number.copy_from_slice(&self.0[at..at + 4]);
        u32::from_be_bytes(number)
    }

    fn program(&self) -> u32 {
        self.number(4)
    }

    fn procedure(&self) -> u32 {
        self.number(12)
    }

    /// Whether it is a plain call: no stream, and no descriptors.
    fn is_call(&self) -> bool {
        self.number(16) == 0
    }

    fn last_number(&self) -> u32 {
        self.number(self.0.len() - 4)
    }

    fn set_last_number(&mut self, number: u32) {
        let at = self.0.len() - 4;
        self.0[at..].copy_from_slice(&number.to_be_bytes());
    }
}

/// What becomes of a message of a client.
trait Rule {
    /// Waits until it may be passed on, and changes it where it must be changed.
    fn apply<'a>(&'a mut self, message: &'a mut Message) -> BoxFuture<'a, Result<()>>;
}

/// Lets through only what a migration asks.
struct OfATarget;

impl Rule for OfATarget {
    fn apply<'a>(&'a mut self, message: &'a mut Message) -> BoxFuture<'a, Result<()>> {
        let is_known = match message.program() {
            REMOTE_PROGRAM => message.is_call() && OF_A_TARGET.contains(&message.procedure()),
            KEEPALIVE_PROGRAM => true,
            _ => false,
        };
        Box::pin(async move { if is_known { Ok(()) } else { Err(unexpected(message)) } })
    }
}

/// Holds Confirm until there is a verdict, and writes that into it.
struct AtTheGate<F> {
    verdict: watch::Receiver<Verdict>,
    sent: F,
}

impl<F: Fn() + Send + Sync> Rule for AtTheGate<F> {
    fn apply<'a>(&'a mut self, message: &'a mut Message) -> BoxFuture<'a, Result<()>> {
        Box::pin(async {
            if message.program() != REMOTE_PROGRAM || !message.is_call() {
                return Ok(());
            }
            if WITHOUT_CONFIRM.contains(&message.procedure()) {
                return Err(unexpected(message));
            }
            if !CONFIRM.contains(&message.procedure()) || message.last_number() != 0 {
                // A migration that has failed goes on here: nothing is committed before Confirm.
                return Ok(());
            }
            (self.sent)();
            let gone = |_| Error::new(ErrorKind::BrokenPipe, "nobody says what becomes of the domain");
            let verdict = *self.verdict.wait_for(|verdict| *verdict != Verdict::Open).await.map_err(gone)?;
            message.set_last_number(u32::from(verdict == Verdict::Here));
            Ok(())
        })
    }
}

/// Carries messages between the other host's client and this host's libvirt, and lets through only what a migration asks. Ends when
/// one side does, or asks something else.
pub(super) async fn filter(client: impl AsyncRead + AsyncWrite, libvirt: impl AsyncRead + AsyncWrite) -> Result<()> {
    carry(client, libvirt, OfATarget).await
}

/// Carries messages between a client that migrates a domain and this host's libvirt. Libvirt hears Confirm once there is a
/// verdict, and hears the verdict by it. `sent` is told that Confirm waits.
pub(super) async fn gate(
    client: impl AsyncRead + AsyncWrite,
    libvirt: impl AsyncRead + AsyncWrite,
    verdict: watch::Receiver<Verdict>,
    sent: impl Fn() + Send + Sync,
) -> Result<()> {
    carry(client, libvirt, AtTheGate { verdict, sent }).await
}

fn unexpected(message: &Message) -> Error {
    let (program, procedure) = (message.program(), message.procedure());
    Error::new(ErrorKind::PermissionDenied, format!("procedure {procedure} of program {program:#x} is not let through"))
}

/// Carries both ways, what the client says by a rule.
async fn carry(
    client: impl AsyncRead + AsyncWrite,
    libvirt: impl AsyncRead + AsyncWrite,
    mut rule: impl Rule,
) -> Result<()> {
    let (mut client_in, mut client_out) = tokio::io::split(client);
    let (mut libvirt_in, mut libvirt_out) = tokio::io::split(libvirt);
    let calls = async {
        while let Some(mut message) = Message::read(&mut client_in).await? {
            rule.apply(&mut message).await?;
            libvirt_out.write_all(&message.0).await?;
        }
        Ok(())
    };
    let answers = async { tokio::io::copy(&mut libvirt_in, &mut client_out).await.map(drop) };
    tokio::select! {
        done = calls => done,
        done = answers => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn call(procedure: u32, last: u32) -> Vec<u8> {
        let numbers = [32, REMOTE_PROGRAM, 1, procedure, 0, 7, 0, last];
        numbers.iter().flat_map(|number| number.to_be_bytes()).collect()
    }

    async fn heard(libvirt: &mut tokio::io::DuplexStream) -> Vec<u8> {
        let mut bytes = vec![0; 32];
        libvirt.read_exact(&mut bytes).await.expect("heard");
        bytes
    }

    #[tokio::test]
    async fn the_other_host_may_only_migrate() {
        for (procedure, is_let_through) in [(1, true), (303, true), (306, true), (10, false), (11, false), (12, false)]
        {
            let (mut client, near) = tokio::io::duplex(1 << 10);
            let (far, mut libvirt) = tokio::io::duplex(1 << 10);
            let carried = tokio::spawn(async move { filter(near, far).await });
            client.write_all(&call(procedure, 0)).await.expect("sent");
            if is_let_through {
                assert_eq!(heard(&mut libvirt).await, call(procedure, 0));
                drop(client);
                carried.await.expect("no panic").expect("it ends with its client");
            } else {
                let error = carried.await.expect("no panic").expect_err("it was let through");
                assert_eq!(error.kind(), ErrorKind::PermissionDenied);
            }
        }
    }

    #[tokio::test]
    async fn libvirt_hears_confirm_once_the_move_is_decided_and_hears_how() {
        for (verdict, cancelled) in [(Verdict::Away, 0), (Verdict::Here, 1)] {
            let (mut client, near) = tokio::io::duplex(1 << 10);
            let (far, mut libvirt) = tokio::io::duplex(1 << 10);
            let (decide, decided) = watch::channel(Verdict::Open);
            let sent = std::sync::Arc::new(AtomicBool::new(false));
            let told = std::sync::Arc::clone(&sent);
            tokio::spawn(gate(near, far, decided, move || told.store(true, Ordering::Release)));
            client.write_all(&call(305, 5)).await.expect("sent");
            assert_eq!(heard(&mut libvirt).await, call(305, 5));
            client.write_all(&call(307, 0)).await.expect("sent");
            while !sent.load(Ordering::Acquire) {
                tokio::task::yield_now().await;
            }
            assert!(futures::poll!(std::pin::pin!(heard(&mut libvirt))).is_pending(), "it has heard it before");
            decide.send_replace(verdict);
            assert_eq!(heard(&mut libvirt).await, call(307, cancelled));
        }
    }

    #[tokio::test]
    async fn libvirt_does_not_hear_confirm_if_nobody_decides() {
        let (mut client, near) = tokio::io::duplex(1 << 10);
        let (far, mut libvirt) = tokio::io::duplex(1 << 10);
        let (decide, decided) = watch::channel(Verdict::Open);
        let carried = tokio::spawn(gate(near, far, decided, || ()));
        client.write_all(&call(307, 0)).await.expect("sent");
        drop(decide);
        carried.await.expect("no panic").expect_err("nobody has decided");
        assert_eq!(libvirt.read(&mut [0; 32]).await.expect("closed"), 0);
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            runtime.block_on(async {
                let (mut client, near) = tokio::io::duplex(1 << 10);
                let (far, _libvirt) = tokio::io::duplex(1 << 10);
                client.write_all(&bytes).await.expect("sent");
                drop(client);
                let _ = filter(near, far).await;
            });
        }
    }
}
