//! The handshake: fixed newstyle. It ends with an export and what was negotiated for it, or without.
//!
//! ```text
//!  greeting ──▶ options ──▶ export chosen               unencrypted
//!  greeting ──▶ STARTTLS only ──▶ TLS ──▶ options ──▶ export chosen      encrypted: of what came before TLS only the flags stay
//! ```

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use super::execute::{ALLOCATION_CONTEXT, Context};
use super::inbox::Inbox;
use super::{End, Export, Exports, Limits};
use crate::protocol::{
    CONTEXT_ALLOCATION, GoRequest, Greeting, MetaContextRequest, OPTION_HEADER_BYTES, OptionHeader, OptionReplyWriter,
    STRING_BYTES_MAX, handshake_flag, info, option, option_reply, parse_client_flags,
};

/// Options with more data than this are refused and skipped.
const OPTION_BYTES_MAX: u32 = 64 << 10;

/// Options with more data than this are an attack, and end the connection.
const OPTION_BYTES_SKIPPED_MAX: u32 = 1 << 20;

/// What is said to an option that brings data where none belongs.
const NO_DATA: &str = "this option has no data";

/// How a handshake ended.
pub(super) enum Outcome {
    /// The client chose an export.
    Transmission(Arc<Export>, Context),
    /// There is nothing further to do.
    Ended(End),
}

/// Carries out the handshake with the client behind `stream`.
pub(super) async fn run<S>(stream: &mut S, inbox: &mut Inbox, exports: &dyn Exports, limits: &Limits) -> Outcome
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut handshake = Handshake::new(stream, inbox, exports, limits);
    let outcome = async {
        let flags = handshake.greet().await?;
        handshake.choose(flags).await
    };
    Outcome::of(outcome.await)
}

/// Meets a client that is to ask for TLS before anything else; gives the flags that it has set when it has done so.
pub(super) async fn until_tls<S>(
    stream: &mut S,
    inbox: &mut Inbox,
    exports: &dyn Exports,
    limits: &Limits,
) -> Result<u16, End>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut handshake = Handshake::new(stream, inbox, exports, limits);
    let flags = handshake.greet().await?;
    handshake.wait_for_tls().await?;
    match inbox.filled().is_empty() {
        true => Ok(flags),
        // Its author is unknown: it was not encrypted, and would pass for something that was.
        false => Err(End::Protocol("the client went on before TLS had begun")),
    }
}

/// Carries out the rest of the handshake with a client that was met before TLS, and has set `flags` then.
pub(super) async fn run_encrypted<S>(
    stream: &mut S,
    inbox: &mut Inbox,
    flags: u16,
    exports: &dyn Exports,
    limits: &Limits,
) -> Outcome
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut handshake = Handshake { is_encrypted: true, ..Handshake::new(stream, inbox, exports, limits) };
    Outcome::of(handshake.choose(flags).await)
}

impl Outcome {
    fn of(outcome: Result<(Arc<Export>, Context), End>) -> Self {
        match outcome {
            Ok((export, context)) => Self::Transmission(export, context),
            Err(end) => Self::Ended(end),
        }
    }
}

struct Handshake<'a, S> {
    stream: &'a mut S,
    inbox: &'a mut Inbox,
    exports: &'a dyn Exports,
    limits: &'a Limits,
    is_encrypted: bool,
    is_structured: bool,
    /// The export for which `base:allocation` was chosen.
    allocation_of: Option<String>,
}

/// What follows from an option.
enum Next {
    Reply(Vec<u8>),
    Last(Vec<u8>, End),
    Transmission(Vec<u8>, Arc<Export>, Context),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match error.kind() {
            BrokenPipe | ConnectionReset | UnexpectedEof => Self::HungUp,
            _ => Self::Stream(error),
        }
    }
}

impl<'a, S: AsyncRead + AsyncWrite + Unpin> Handshake<'a, S> {
    fn new(stream: &'a mut S, inbox: &'a mut Inbox, exports: &'a dyn Exports, limits: &'a Limits) -> Self {
        let (is_encrypted, is_structured, allocation_of) = (false, false, None);
        Self { stream, inbox, exports, limits, is_encrypted, is_structured, allocation_of }
    }

    async fn greet(&mut self) -> Result<u16, End> {
        let offered = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        self.send(&Greeting { flags: offered }.to_bytes()).await?;
        let flags = self.receive::<4>().await?;
        parse_client_flags(flags).map_err(|_| End::Protocol("the client set handshake flags that were not offered"))
    }

    async fn option_header(&mut self) -> Result<OptionHeader, End> {
        let header = self.receive::<OPTION_HEADER_BYTES>().await?;
        OptionHeader::parse(&header).map_err(|_| End::Protocol("an option does not begin with IHAVEOPT"))
    }

    /// Refuses every option but the one that begins TLS.
    async fn wait_for_tls(&mut self) -> Result<(), End> {
        for _ in 0..self.limits.options_max {
            let header = self.option_header().await?;
            if header.length > OPTION_BYTES_MAX {
                self.refuse_long(header).await?;
                continue;
            }
            let data = self.receive_vec(header.length as usize).await?;
            let replies = OptionReplyWriter::new(header.option);
            match header.option {
                option::STARTTLS if data.is_empty() => return self.send(&replies.acknowledge()).await,
                option::STARTTLS => self.send(&replies.refuse(option_reply::ERR_INVALID, NO_DATA)).await?,
                // The client may have gone without waiting for the answer.
                option::ABORT => {
                    let _ = self.send(&replies.acknowledge()).await;
                    return Err(End::Aborted);
                }
                option::EXPORT_NAME => return Err(End::Protocol("the client asked for an export before TLS")),
                _ => self.send(&replies.refuse(option_reply::ERR_TLS_REQD, "TLS comes first here")).await?,
            }
        }
        Err(End::Protocol("the client sent more options than anybody needs"))
    }

    async fn choose(&mut self, flags: u16) -> Result<(Arc<Export>, Context), End> {
        for _ in 0..self.limits.options_max {
            let header = self.option_header().await?;
            if flags & handshake_flag::FIXED_NEWSTYLE == 0 && header.option != option::EXPORT_NAME {
                return Err(End::Protocol("a client that is not fixed newstyle may only name an export"));
            }
            if header.length > OPTION_BYTES_MAX {
                self.refuse_long(header).await?;
                continue;
            }
            let data = self.receive_vec(header.length as usize).await?;
            match self.answer(header.option, &data, flags & handshake_flag::NO_ZEROES != 0)? {
                Next::Reply(reply) => self.send(&reply).await?,
                Next::Last(reply, end) => {
                    // The client may have gone without waiting for the answer.
                    let _ = self.send(&reply).await;
                    return Err(end);
                }
                Next::Transmission(reply, export, context) => {
                    self.send(&reply).await?;
                    return Ok((export, context));
                }
            }
        }
        Err(End::Protocol("the client sent more options than anybody needs"))
    }

    fn answer(&mut self, option: u32, data: &[u8], no_zeroes: bool) -> Result<Next, End> {
        let mut replies = OptionReplyWriter::new(option);
        let next = match option {
            option::EXPORT_NAME => return self.export_name(data, no_zeroes),
            option::ABORT => Next::Last(replies.acknowledge(), End::Aborted),
            option::INFO | option::GO => self.go(option, data),
            option::LIST | option::STRUCTURED_REPLY | option::STARTTLS if !data.is_empty() => {
                Next::Reply(replies.refuse(option_reply::ERR_INVALID, NO_DATA))
            }
            option::LIST => {
                self.exports.list().iter().for_each(|export| replies.server(export.name(), export.description()));
                Next::Reply(replies.acknowledge())
            }
            option::STRUCTURED_REPLY => {
                self.is_structured = true;
                Next::Reply(replies.acknowledge())
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => Next::Reply(self.meta_context(option, data)),
            option::STARTTLS if self.is_encrypted => {
                Next::Reply(replies.refuse(option_reply::ERR_INVALID, "this is TLS already"))
            }
            option::STARTTLS => Next::Reply(replies.refuse(option_reply::ERR_UNSUP, "this export has no TLS")),
            _ => Next::Reply(replies.refuse(option_reply::ERR_UNSUP, "this option is unknown to the server")),
        };
        Ok(next)
    }

    /// The old way to choose an export: no error can be answered, only the connection closed.
    fn export_name(&self, data: &[u8], no_zeroes: bool) -> Result<Next, End> {
        let name = std::str::from_utf8(data).ok().filter(|name| name.len() <= STRING_BYTES_MAX);
        let name = name.ok_or(End::Protocol("the name of an export is too long or not UTF-8"))?;
        let export =
            self.exports.find(name).ok_or(End::Protocol("there is no export of the name that was asked for"))?;
        let has_allocation = self.allocation_of.as_deref() == Some(name);
        let (context, told) = export.context(self.is_structured, has_allocation, self.limits);
        let mut reply = [&told.size.get().to_be_bytes()[..], &told.flags.to_be_bytes()].concat();
        if !no_zeroes {
            reply.resize(reply.len() + 124, 0);
        }
        Ok(Next::Transmission(reply, export, context))
    }

    fn go(&self, option: u32, data: &[u8]) -> Next {
        let mut replies = OptionReplyWriter::new(option);
        let request = match GoRequest::parse(data) {
            Ok(request) => request,
            Err(malformed) => return Next::Reply(replies.refuse(option_reply::ERR_INVALID, &malformed.to_string())),
        };
        let Some(export) = self.exports.find(request.name) else {
            return Next::Reply(replies.refuse(option_reply::ERR_UNKNOWN, "there is no export of this name"));
        };
        let has_allocation = self.allocation_of.as_deref() == Some(request.name);
        let (context, told) = export.context(self.is_structured, has_allocation, self.limits);
        replies.export(told);
        // Sent whether asked for or not: a client that ignores it gets clean errors for what breaks it.
        replies.block_sizes(context.sizes);
        if request.items.contains(&info::NAME) {
            replies.text(info::NAME, export.name());
        }
        if request.items.contains(&info::DESCRIPTION) && !export.description().is_empty() {
            replies.text(info::DESCRIPTION, export.description());
        }
        match option {
            option::GO => Next::Transmission(replies.acknowledge(), export, context),
            _ => Next::Reply(replies.acknowledge()),
        }
    }

    fn meta_context(&mut self, option: u32, data: &[u8]) -> Vec<u8> {
        let is_choice = option == option::SET_META_CONTEXT;
        if is_choice {
            // Whatever the outcome, the earlier choice is gone.
            self.allocation_of = None;
        }
        let mut replies = OptionReplyWriter::new(option);
        if !self.is_structured {
            return replies.refuse(option_reply::ERR_INVALID, "metadata contexts need structured replies first");
        }
        let request = match MetaContextRequest::parse(data) {
            Ok(request) => request,
            Err(malformed) => return replies.refuse(option_reply::ERR_INVALID, &malformed.to_string()),
        };
        if self.exports.find(request.name).is_none() {
            return replies.refuse(option_reply::ERR_UNKNOWN, "there is no export of this name");
        }
        let is_wanted = match is_choice {
            true => request.queries.contains(&CONTEXT_ALLOCATION),
            false => {
                request.queries.is_empty()
                    || request.queries.iter().any(|query| matches!(*query, "base:" | CONTEXT_ALLOCATION))
            }
        };
        if is_wanted {
            replies.meta_context(if is_choice { ALLOCATION_CONTEXT } else { 0 }, CONTEXT_ALLOCATION);
        }
        if is_wanted && is_choice {
            self.allocation_of = Some(request.name.to_owned());
        }
        replies.acknowledge()
    }

    async fn refuse_long(&mut self, header: OptionHeader) -> Result<(), End> {
        if header.length > OPTION_BYTES_SKIPPED_MAX || header.option == option::EXPORT_NAME {
            return Err(End::Protocol("the data of an option is longer than anybody needs"));
        }
        let mut left = header.length as usize;
        while left > 0 {
            self.wait_for(1).await?;
            let count = left.min(self.inbox.filled().len());
            self.inbox.consume(count);
            left -= count;
        }
        let replies = OptionReplyWriter::new(header.option);
        self.send(&replies.refuse(option_reply::ERR_TOO_BIG, "the data of this option is too long")).await
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), End> {
        self.stream.write_all(bytes).await?;
        Ok(self.stream.flush().await?)
    }

    /// Reads until `count` bytes are there, which the inbox must have room for.
    async fn wait_for(&mut self, count: usize) -> Result<(), End> {
        while self.inbox.filled().len() < count {
            let received = poll_fn(|context| self.inbox.poll_fill(Pin::new(&mut *self.stream), context)).await?;
            if received == 0 {
                return Err(End::HungUp);
            }
        }
        Ok(())
    }

    async fn receive<const COUNT: usize>(&mut self) -> Result<[u8; COUNT], End> {
        self.wait_for(COUNT).await?;
        let bytes = *self.inbox.filled().first_chunk().expect("wait_for has made sure of it");
        self.inbox.consume(COUNT);
        Ok(bytes)
    }

    async fn receive_vec(&mut self, count: usize) -> Result<Vec<u8>, End> {
        self.wait_for(count).await?;
        let bytes = self.inbox.filled()[..count].to_vec();
        self.inbox.consume(count);
        Ok(bytes)
    }
}
