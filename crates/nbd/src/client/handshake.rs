//! The client's side of the handshake: TLS if wanted, structured replies and `base:allocation` if offered, GO.

use block::{Error, ErrorKind, Result};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::protocol::{
    BlockSizes, CONTEXT_ALLOCATION, ExportInfo, GoRequest, Greeting, InfoReply, MetaContextRequest,
    OPTION_REPLY_HEADER_BYTES, OptionReplyHeader, handshake_flag, info, option, option_reply, parse_info,
    parse_meta_context, write_option,
};
use crate::tls::TlsError;

/// Longer replies to options make no sense.
const REPLY_BYTES_MAX: u32 = 64 << 10;

/// More replies to one option make no sense.
const REPLIES_MAX: usize = 1024;

/// What was negotiated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Negotiated {
    pub(super) export: ExportInfo,
    pub(super) sizes: BlockSizes,
    pub(super) is_structured: bool,
    /// The number of `base:allocation`, if the server has it.
    pub(super) allocation: Option<u32>,
}

/// Reads the greeting of the server behind `stream`, and answers it.
pub(super) async fn greet<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> Result<()> {
    let mut handshake = Handshake { stream };
    let mut greeting = [0; Greeting::BYTES];
    handshake.read(&mut greeting).await?;
    let greeting = Greeting::parse(&greeting).map_err(|error| broken("the greeting", error))?;
    if greeting.flags & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err(Error::new(ErrorKind::Unsupported, "the NBD server is not fixed newstyle"));
    }
    let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    handshake.write(&u32::from(greeting.flags & known).to_be_bytes()).await
}

/// Asks the greeted server to go on with TLS. The next bytes sent and received are TLS's.
pub(super) async fn start_tls<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> Result<()> {
    let mut handshake = Handshake { stream };
    handshake.write(&write_option(option::STARTTLS, &[])).await?;
    match handshake.reply(option::STARTTLS).await? {
        (option_reply::ACK, data) if data.is_empty() => Ok(()),
        (reply, words) if reply & option_reply::ERROR != 0 => {
            let words = String::from_utf8_lossy(&words).into_owned();
            Err(TlsError::NotSpoken(words).while_doing("encrypting"))
        }
        _ => Err(unexpected("TLS")),
    }
}

/// Chooses the export `name` of the greeted server.
pub(super) async fn negotiate<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, name: &str) -> Result<Negotiated> {
    let mut handshake = Handshake { stream };
    handshake.write(&write_option(option::STRUCTURED_REPLY, &[])).await?;
    let is_structured = match handshake.reply(option::STRUCTURED_REPLY).await? {
        (option_reply::ACK, _) => true,
        (reply, _) if reply & option_reply::ERROR != 0 => false,
        _ => return Err(unexpected("structured replies")),
    };
    let allocation = if is_structured { handshake.choose_allocation(name).await? } else { None };
    let (export, sizes) = handshake.go(name).await?;
    Ok(Negotiated { export, sizes, is_structured, allocation })
}

struct Handshake<'a, S> {
    stream: &'a mut S,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Handshake<'_, S> {
    async fn choose_allocation(&mut self, name: &str) -> Result<Option<u32>> {
        let request = MetaContextRequest { name, queries: vec![CONTEXT_ALLOCATION] };
        self.write(&write_option(option::SET_META_CONTEXT, &request.to_bytes())).await?;
        let mut allocation = None;
        for _ in 0..REPLIES_MAX {
            match self.reply(option::SET_META_CONTEXT).await? {
                (option_reply::META_CONTEXT, data) => {
                    let (id, context) = parse_meta_context(&data).map_err(|error| broken("a context", error))?;
                    if context == CONTEXT_ALLOCATION {
                        allocation = Some(id);
                    }
                }
                (option_reply::ACK, _) => return Ok(allocation),
                (reply, _) if reply & option_reply::ERROR != 0 => return Ok(None),
                _ => break,
            }
        }
        Err(unexpected("metadata contexts"))
    }

    async fn go(&mut self, name: &str) -> Result<(ExportInfo, BlockSizes)> {
        let request = GoRequest { name, items: vec![info::BLOCK_SIZE] };
        self.write(&write_option(option::GO, &request.to_bytes())).await?;
        let mut export = None;
        // The protocol's defaults for a client that is told nothing.
        let mut sizes = BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 };
        for _ in 0..REPLIES_MAX {
            match self.reply(option::GO).await? {
                (option_reply::INFO, data) => {
                    match parse_info(&data).map_err(|error| broken("an export's description", error))? {
                        InfoReply::Export(told) => export = Some(told),
                        InfoReply::BlockSizes(told) => sizes = told,
                        InfoReply::Name(_) | InfoReply::Description(_) | InfoReply::Unknown => {}
                    }
                }
                (option_reply::ACK, _) => {
                    let export = export.ok_or_else(|| unexpected("an export's size"))?;
                    return Ok((export, sizes));
                }
                (option_reply::ERR_UNKNOWN, _) => {
                    return Err(Error::new(ErrorKind::NotFound, format!("the NBD server has no export \"{name}\"")));
                }
                (reply, data) if reply & option_reply::ERROR != 0 => {
                    let kind = match reply {
                        option_reply::ERR_UNSUP => ErrorKind::Unsupported,
                        option_reply::ERR_POLICY => ErrorKind::PermissionDenied,
                        _ => ErrorKind::Invalid,
                    };
                    let words = String::from_utf8_lossy(&data).into_owned();
                    return Err(Error::new(
                        kind,
                        format!("the NBD server refused export \"{name}\" ({reply:#x}): {words}"),
                    ));
                }
                _ => break,
            }
        }
        Err(unexpected("an export"))
    }

    /// One reply to `option`: its type and its data.
    async fn reply(&mut self, option: u32) -> Result<(u32, Vec<u8>)> {
        let mut header = [0; OPTION_REPLY_HEADER_BYTES];
        self.read(&mut header).await?;
        let header = OptionReplyHeader::parse(&header).map_err(|error| broken("an option's reply", error))?;
        if header.option != option || header.length > REPLY_BYTES_MAX {
            return Err(unexpected("an option"));
        }
        let mut data = vec![0; header.length as usize];
        self.read(&mut data).await?;
        if header.reply == option_reply::ERR_TLS_REQD {
            return Err(TlsError::Required.while_doing("connecting without TLS"));
        }
        if header.reply == option_reply::ERR_SHUTDOWN {
            return Err(Error::new(ErrorKind::Disconnected, "the NBD server shuts down"));
        }
        Ok((header.reply, data))
    }

    async fn read(&mut self, bytes: &mut [u8]) -> Result<()> {
        let outcome = self.stream.read_exact(bytes).await;
        outcome.map(drop).map_err(|error| Error::from_os(error, "the NBD server left during the handshake"))
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = async {
            self.stream.write_all(bytes).await?;
            self.stream.flush().await
        };
        written.await.map_err(|error| Error::from_os(error, "the NBD server left during the handshake"))
    }
}

fn broken(what: &str, error: crate::protocol::Malformed) -> Error {
    Error::new(ErrorKind::Invalid, format!("the NBD server broke the protocol in {what}")).with_source(error)
}

fn unexpected(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("the NBD server broke the protocol: no sensible answer about {what}"))
}
