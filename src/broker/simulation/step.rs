//! The steps of a schedule and their random generation, and the defects that the simulation must find. Those are in the surroundings of the
//! broker's code, which stays unchanged.

use super::world::CLIENTS;
use crate::wire::broker::Token;

/// One step. A step that does not apply, such as a kill of a dead server, changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// A client without an unanswered request makes one.
    Ask(usize, Request),
    /// A client repeats its last request, as if it had not received the answer.
    Repeat(usize),
    /// The server reads the next record of a connection, counted among those with unread records.
    Deliver(usize),
    /// A client reads its next record.
    Receive(usize),
    /// Server, keeper and a client exchange records until none is left.
    Exchange(usize),
    /// A client's socket becomes full, or has room again.
    Block(usize),
    /// A client releases its claim or its oldest lease.
    Release(usize),
    /// A client tries to resume the lease of another user.
    Steal(usize),
    /// A client gets the memory of its oldest lease.
    Select(usize),
    Connect(usize),
    /// A connection breaks. The client stays.
    HangUp(usize),
    /// A client's process is replaced by another, which holds nothing.
    KillClient(usize),
    /// The event loop does its background work.
    Turn,
    /// The event loop handles its keeper's connection.
    Flush,
    /// The keeper reads a message.
    KeeperReads,
    /// Both.
    Sync,
    KillServer,
    /// The server is killed after this number of effects.
    KillServerAfter(u8),
    /// The keeper's socket becomes full.
    Clog,
    /// The server is asked to exit for another one.
    Upgrade,
    StartServer,
    KillKeeper,
    StartKeeper,
    /// The keeper closes the server's connection, and stays.
    KeeperHangsUp,
    /// Time passes, in milliseconds.
    Tick(u64),
    /// Someone sets the system's clock forward or back, by this number of milliseconds.
    SetClock(i64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Put {
        name: usize,
        memory: usize,
        kind: Kind,
    },
    Get {
        name: usize,
        wait: u64,
        newer: bool,
    },
    /// A lease without memory.
    Describe {
        name: usize,
    },
    Claim {
        name: usize,
        wait: u64,
    },
    Delete {
        name: usize,
    },
    Watch,
    List,
    /// Tries to resume this lease of another user.
    Steal(Token),
    /// Gets the memory of a lease.
    Select {
        name: usize,
        lease: Token,
    },
}

/// The kinds of puts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The name must not exist.
    New,
    Replace,
    /// With metadata in a memfd.
    Table,
    /// The name keeps one earlier version.
    Keep,
    /// The name ends with its maker; with its maker and the last lease; 1 s after the last lease.
    Maker,
    Leased,
    Idle,
    /// Part of a version with two parts: even clients put `x`, odd clients `y`.
    Part,
    /// Two segments, of which the second follows after the server has room for it.
    Long,
}

const KINDS: [Kind; 9] =
    [Kind::New, Kind::Replace, Kind::Table, Kind::Keep, Kind::Maker, Kind::Leased, Kind::Idle, Kind::Part, Kind::Long];

/// Random numbers from a seed (splitmix64).
#[derive(Debug, Clone)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// A schedule of `length` steps.
    pub(super) fn schedule(&mut self, length: usize) -> Vec<Step> {
        (0..length).map(|_| self.step()).collect()
    }

    fn step(&mut self) -> Step {
        let client = self.below(CLIENTS);
        match self.below(100) {
            0..30 => Step::Ask(client, self.request()),
            30..32 => Step::Repeat(client),
            32..40 => Step::Deliver(self.below(CLIENTS)),
            40..45 => Step::Receive(client),
            45..59 => Step::Exchange(client),
            59..61 => Step::Turn,
            61..63 => Step::Block(client),
            63..69 => Step::Release(client),
            69 => Step::Steal(client),
            70..72 => Step::Connect(client),
            72..74 => Step::HangUp(client),
            74 => Step::KillClient(client),
            75..77 => Step::Select(client),
            77..80 => Step::Turn,
            80 => Step::Flush,
            81 => Step::KeeperReads,
            82 => Step::Sync,
            83 => Step::Clog,
            84 => Step::KillServer,
            85 => Step::KillServerAfter(self.below(8) as u8),
            86..88 => Step::Upgrade,
            88..91 => Step::StartServer,
            91 => self.of(&[Step::KillKeeper, Step::KeeperHangsUp]),
            92..94 => Step::StartKeeper,
            94..99 => Step::Tick(self.of(&[1, 400, 1000, 5000, 11_000, 40_000])),
            _ => Step::SetClock(self.of(&[-3_600_000, -1, 1000, 86_400_000])),
        }
    }

    fn request(&mut self) -> Request {
        let (name, wait) = (self.of(&[0, 0, 1, 2]), self.of(&[0, 500, 3000]));
        match self.below(16) {
            0..6 => Request::Put { name, memory: self.below(4), kind: self.of(&KINDS) },
            6..9 => Request::Get { name, wait, newer: self.below(4) == 0 },
            9 => Request::Describe { name },
            10..12 => Request::Claim { name, wait },
            12..14 => Request::Delete { name },
            14 => Request::Watch,
            _ => Request::List,
        }
    }
}

/// Defines the flaws and their list.
macro_rules! flaws {
    ($($(#[$doc:meta])* $flaw:ident,)*) => {
        /// A defect of the event loop, the keeper or a client.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Flaw {
            $($(#[$doc])* $flaw,)*
        }

        pub(super) const FLAWS: &[Flaw] = &[$(Flaw::$flaw,)*];
    };
}

flaws! {
    AnswersLost,
    AnswersMisdirected,
    AnswersSwapped,
    /// A put is answered before the keeper has its descriptors.
    AnswersTooEarly,
    /// A lease carries the descriptor of another segment.
    WrongDescriptor,
    RequestsRepeated,
    ReleasesLost,
    DisconnectsLost,
    DeadlinesLost,
    ExpiriesLost,
    /// All connections seem to belong to one user.
    UsersConfused,
    /// The event loop does not notice that the keeper's socket has room again.
    KeeperWakeUpsLost,
    WatchWakeUpsLost,
    EntriesNotResent,
    /// A new keeper does not get the message that its set is complete.
    CompleteNotSent,
    DescriptorsSwapped,
    /// A bit of the last manifest changes.
    ManifestDamaged,
    RequestsForgotten,
    /// A new server ends all leases at once.
    NoGrace,
    /// A new server never ends leases that no client resumes.
    EndlessGrace,
    TokensRepeated,
    RequestsRenumbered,
    LeasesNotResumed,
}
