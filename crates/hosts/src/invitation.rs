//! The code that one host gives out and a person tells another one. It is short, and good once, for a while, and for a
//! few tries.
//!
//! ```text
//!   none ──invite──▶ open ──a host has joined──▶ none
//!                     │ ▲
//!            10 minutes, └─ a new invitation takes the place of any
//!            or 3 tries
//!                     ▼
//!                   spent (it says why until there is a new one)
//! ```
//!
//! The exchange of passwords gives an attacker who does not know the code nothing to try it on but this host. So what
//! counts is how often this host answers. A try is counted when it begins.

use std::time::Duration;

use env::{Env, Moment};
use parking_lot::Mutex;

use crate::message::Refusal;
use crate::name::HostName;

/// How long a code is good for.
pub const LIFE: Duration = Duration::from_secs(600);
/// How often it may be tried.
pub const TRIES: u32 = 3;

/// No 0, O, 1, I, L or U: what is read aloud comes back right, and spells nothing.
const LETTERS: &[u8; 30] = b"23456789ABCDEFGHJKMNPQRSTVWXYZ";
const LENGTH: usize = 8;

/// A code as it is typed: two groups of four. Its case and what stands between do not matter.
#[derive(Clone, PartialEq, Eq)]
pub struct Code(String);

impl Code {
    fn new(env: &dyn Env) -> Self {
        let mut letters = String::with_capacity(LENGTH);
        while letters.len() < LENGTH {
            // Five bits at a time; those that are no letter are thrown away, so that each is as likely as any.
            let bits = usize::try_from(env.random() >> 59).expect("five bits");
            if let Some(letter) = LETTERS.get(bits) {
                letters.push(char::from(*letter));
            }
        }
        Self(letters)
    }

    /// What somebody has typed.
    pub fn typed(text: &str) -> Self {
        let letters = text.chars().filter(char::is_ascii_alphanumeric).map(|letter| letter.to_ascii_uppercase());
        Self(letters.take(64).collect())
    }

    /// Whether it can be a code at all.
    pub fn is_whole(&self) -> bool {
        self.0.len() == LENGTH && self.0.bytes().all(|letter| LETTERS.contains(&letter))
    }

    /// As a person reads it.
    pub fn shown(&self) -> String {
        let (one, other) = self.0.split_at(LENGTH.min(self.0.len()) / 2);
        format!("{one}-{other}")
    }

    /// What both sides enter into the exchange.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

struct Invitation {
    number: u64,
    code: Code,
    until: Moment,
    tries_left: u32,
    name: Option<HostName>,
}

/// A try that may go on.
pub struct Try {
    /// The code that was given out.
    pub code: Code,
    /// How often it may be tried after this.
    pub tries_left: u32,
    /// What the host that joins is to be called here.
    pub name: Option<HostName>,
    number: u64,
}

/// The one invitation that is open, if any.
#[derive(Default)]
pub struct Invitations(Mutex<(u64, Option<Invitation>)>);

impl Invitations {
    /// Opens one, in the place of any that was.
    pub fn open(&self, name: Option<HostName>, env: &dyn Env) -> Code {
        let mut state = self.0.lock();
        let code = Code::new(env);
        state.0 += 1;
        let number = state.0;
        state.1 = Some(Invitation { number, code: code.clone(), until: env.now() + LIFE, tries_left: TRIES, name });
        code
    }

    /// Takes one try.
    pub fn take_try(&self, now: Moment) -> Result<Try, Refusal> {
        let mut state = self.0.lock();
        let invitation = state.1.as_mut().ok_or(Refusal::NoInvitation)?;
        if now > invitation.until {
            return Err(Refusal::CodeExpired);
        }
        if invitation.tries_left == 0 {
            return Err(Refusal::TriesUsedUp);
        }
        invitation.tries_left -= 1;
        Ok(Try {
            code: invitation.code.clone(),
            tries_left: invitation.tries_left,
            name: invitation.name.clone(),
            number: invitation.number,
        })
    }

    /// The code of `used` has brought a host in, and brings no other. Of two that come at once one is late.
    pub fn close(&self, used: &Try) -> Result<(), Refusal> {
        let mut state = self.0.lock();
        match state.1.take_if(|invitation| invitation.number == used.number) {
            Some(_) => Ok(()),
            None => Err(Refusal::NoInvitation),
        }
    }
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn a_code_is_read_as_it_is_written_in_any_case_and_grouping() {
        let code = Code::new(&env::RealEnv::new());
        assert!(code.is_whole());
        assert!(Code::typed(&code.shown()) == code);
        assert!(Code::typed(&code.shown().to_lowercase().replace('-', " ")) == code);
        assert!(!Code::typed("ABCD-EFG").is_whole());
        assert!(!Code::typed("ABCD-EFG0").is_whole());
    }

    #[tokio::test(start_paused = true)]
    async fn an_invitation_is_good_once_for_three_tries_and_ten_minutes() {
        let env = env::testing::PausedEnv::shared(7);
        let invitations = Invitations::default();
        assert_eq!(invitations.take_try(env.now()).err(), Some(Refusal::NoInvitation));

        invitations.open(None, &*env);
        for left in [2, 1, 0] {
            assert_eq!(invitations.take_try(env.now()).expect("good").tries_left, left);
        }
        assert_eq!(invitations.take_try(env.now()).err(), Some(Refusal::TriesUsedUp));

        invitations.open(None, &*env);
        env.sleep(LIFE).await;
        let first = invitations.take_try(env.now()).expect("just in time");
        env.sleep(Duration::from_secs(1)).await;
        assert_eq!(invitations.take_try(env.now()).err(), Some(Refusal::CodeExpired));
        assert_eq!(invitations.close(&first), Ok(()), "what began in time may end");

        invitations.open(None, &*env);
        assert_eq!(invitations.close(&first), Err(Refusal::NoInvitation), "another invitation was closed");
        let (one, other) =
            (invitations.take_try(env.now()).expect("good"), invitations.take_try(env.now()).expect("good"));
        assert_eq!(invitations.close(&one), Ok(()));
        assert_eq!(invitations.close(&other), Err(Refusal::NoInvitation), "one code has brought in two hosts");
    }
}
