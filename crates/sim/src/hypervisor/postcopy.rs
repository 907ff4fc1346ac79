//! Memory that follows its guest.
//!
//! ```text
//!   source:  completing ── the devices' state ─▶ following ── all is there ─▶ sent
//!                                                 ▲     │ its connection is lost
//!                                                 └──── cut
//!   target:  waiting ── the devices' state ─▶ loaded ── run ─▶ running; its memory follows, is cut, or is complete
//! ```
//!
//! A guest whose memory is cut off waits. A source in *following* can be told to go on as long as the target's guest has not run; one
//! in *cut* must be joined to the target again before.

use ::daemon::MemoryFlow;
use migrate::stream::BoxTransport;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::{Instance, LOADED, PIECE_BYTES, PIECE_SPAN_MAX, SimMachine, Stage};
use crate::occurrence::Occurrence;
use crate::port::Port;
use crate::world::Invariant;

/// What a message begins with: a piece of the memory, the devices' state, the end.
const PIECE: u8 = 0x5a;
const DEVICES: u8 = 0xd0;
const END: u8 = 0xee;
/// Most of the memory follows: long enough for daemons to die meanwhile.
const FOLLOWING_PIECES_MAX: u64 = 100;
/// How likely the connection is lost after one piece of it.
const LOST_CHANCE: f64 = 0.01;

impl SimMachine {
    /// Where the memory of a machine is.
    pub(super) fn flow(&self, (host, pid): (usize, u32)) -> MemoryFlow {
        let state = self.shared.state.lock();
        let Some(instance) = state.instances[host].as_ref().filter(|it| it.pid == pid) else {
            return MemoryFlow::Complete;
        };
        match instance.stage {
            Stage::Following => MemoryFlow::Following,
            Stage::Cut => MemoryFlow::Cut,
            _ => instance.flow,
        }
    }

    /// How much of the memory has followed its guest from here.
    pub(super) fn followed(&self, (host, pid): (usize, u32)) -> u64 {
        let state = self.shared.state.lock();
        state.instances[host].as_ref().filter(|it| it.pid == pid).map_or(0, |it| it.followed)
    }

    /// The source sends the devices' state; from then on its guest may be the target's.
    pub(super) async fn send_before_memory(
        &self,
        who: (usize, u32),
        memory: u64,
        stream: &mut BoxTransport,
    ) -> std::io::Result<()> {
        stream.write_u8(DEVICES).await?;
        stream.write_all(&memory.to_le_bytes()).await?;
        match self.enter(who, Stage::Following, |it| it.stage == Stage::Completing) {
            true => Ok(()),
            false => Err(std::io::Error::other("given up")),
        }
    }

    /// The source sends the rest of the memory, until that is done, the connection is lost, or its guest goes on.
    pub(super) async fn follow(self, who: (usize, u32), mut stream: BoxTransport) {
        let outcome = async {
            for _ in 0..self.shared.rng.within(1..=FOLLOWING_PIECES_MAX) {
                stream.write_all(&[PIECE; PIECE_BYTES]).await?;
                self.shared.world.sleep(self.shared.rng.up_to(PIECE_SPAN_MAX)).await;
                if let Some(instance) = self.shared.state.lock().instances[who.0].as_mut() {
                    instance.followed += PIECE_BYTES as u64;
                }
                if self.stage(who) != Stage::Following {
                    return Ok(false);
                }
                if self.shared.rng.chance(LOST_CHANCE) {
                    return Err(std::io::Error::other("the connection is lost"));
                }
            }
            stream.write_u8(END).await?;
            Ok::<_, std::io::Error>(stream.read_u8().await? == LOADED)
        };
        let outcome = outcome.await;
        let next = if matches!(outcome, Ok(true)) { Stage::Sent } else { Stage::Cut };
        self.enter(who, next, |it| it.stage == Stage::Following);
    }

    /// What the target's QEMU does with what comes.
    pub(super) async fn load_before_memory(self, who: (usize, u32), mut inlets: mpsc::UnboundedReceiver<BoxTransport>) {
        let Some(mut main) = inlets.recv().await else { return };
        let devices = async {
            loop {
                match main.read_u8().await? {
                    PIECE => _ = main.read_exact(&mut [0; PIECE_BYTES - 1]).await?,
                    DEVICES => return main.read_u64_le().await,
                    _ => return Err(std::io::Error::other("out of order")),
                }
            }
        };
        let devices = devices.await;
        let refuses = {
            let state = self.shared.state.lock();
            state.instances[who.0].as_ref().is_none_or(|it| it.pid != who.1 || it.refuses)
        };
        match devices {
            Ok(memory) if !refuses => {
                self.set_flow(who, MemoryFlow::Following);
                if self.enter(who, Stage::Loaded(memory), |it| it.stage == Stage::Waiting) {
                    self.load_memory(who, main).await;
                }
            }
            _ => {
                if refuses {
                    let world = &self.shared.world;
                    world.fault("qemu-refuses", format_args!("the target's QEMU refuses the devices' state"));
                }
                self.enter(who, Stage::Failed, |_| true);
            }
        }
    }

    /// The rest of the memory comes.
    async fn load_memory(&self, who: (usize, u32), mut main: BoxTransport) {
        let all = async {
            loop {
                match main.read_u8().await? {
                    PIECE => _ = main.read_exact(&mut [0; PIECE_BYTES - 1]).await?,
                    END => return main.write_u8(LOADED).await,
                    _ => return Err(std::io::Error::other("out of order")),
                }
            }
        };
        let runs = || self.stage(who) == Stage::Running;
        match all.await {
            Ok(()) => {
                self.set_flow(who, MemoryFlow::Complete);
                if runs() {
                    self.shared.world.occur(Occurrence::Told("memory followed"));
                }
            }
            Err(error) => {
                self.set_flow(who, MemoryFlow::Cut);
                if runs() {
                    self.shared.world.fault("memory-cut", format_args!("the guest's memory does not follow: {error}"));
                    self.wait_for_memory(who.0);
                }
            }
        }
        // The source may be gone.
        let _ = main.shutdown().await;
    }

    /// The target waits for another connection of its memory, if it has lost one.
    pub(super) fn wait_again(&self, who: (usize, u32)) -> bool {
        let (inlets, mut incoming) = mpsc::unbounded_channel();
        {
            let mut state = self.shared.state.lock();
            let is_cut = |it: &&mut Instance| it.pid == who.1 && it.stage != Stage::Dead && it.flow == MemoryFlow::Cut;
            let Some(instance) = state.instances[who.0].as_mut().filter(is_cut) else { return false };
            instance.inlets = Some(inlets);
        }
        let machine = self.clone();
        self.shared.world.spawn(async move {
            let Some(main) = incoming.recv().await else { return };
            machine.set_flow(who, MemoryFlow::Following);
            if machine.stage(who) == Stage::Running && !machine.is_paused(who) {
                machine.ports().iter().for_each(Port::go_on);
            }
            machine.load_memory(who, main).await;
        });
        true
    }

    /// Guests that run at `host` without their memory wait for it.
    pub(super) fn wait_for_memory(&self, host: usize) {
        let is_cut = {
            let state = self.shared.state.lock();
            state.at == host && state.instances[host].as_ref().is_some_and(|it| it.flow == MemoryFlow::Cut)
        };
        for port in self.ports().into_iter().filter(|_| is_cut) {
            self.shared.world.spawn(async move { port.stop().await });
        }
    }

    /// A QEMU that is ended has no memory that the other one's guest still needs.
    pub(super) fn check_memory_kept(&self, host: usize, was: Stage, why: &str) {
        let lacks = {
            let state = self.shared.state.lock();
            let other = state.instances[1 - host].as_ref();
            other.is_some_and(|it| it.stage == Stage::Running && it.flow != MemoryFlow::Complete)
        };
        if lacks && matches!(was, Stage::Following | Stage::Cut) {
            let what = format!("the QEMU at host {host} is ended with memory that its guest lacks: {why}");
            self.shared.world.violate(Invariant::StableRead, what);
        }
    }

    fn set_flow(&self, (host, pid): (usize, u32), flow: MemoryFlow) {
        let mut state = self.shared.state.lock();
        if let Some(instance) = state.instances[host].as_mut().filter(|it| it.pid == pid) {
            instance.flow = flow;
        }
        drop(state);
        self.shared.world.event(format_args!("the memory of the QEMU at host {host} is {flow:?}"));
    }
}
