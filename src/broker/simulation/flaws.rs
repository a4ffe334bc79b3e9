//! The defects that the simulation must find. They are in the surroundings of the broker's code, which stays unchanged.

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
    /// Some answers are not sent.
    AnswersLost,
    /// Some answers go to another client.
    AnswersMisdirected,
    /// Two records to a client change places.
    AnswersSwapped,
    /// A put is answered before the keeper has its descriptors.
    AnswersTooEarly,
    /// A lease carries the descriptor of another segment.
    WrongDescriptor,
    /// Some requests are read twice.
    RequestsRepeated,
    /// Some releases are not read.
    ReleasesLost,
    /// Closed connections go unnoticed.
    DisconnectsLost,
    /// Deadlines are not set.
    DeadlinesLost,
    /// Names that expire are not checked.
    ExpiriesLost,
    /// All connections seem to belong to one user.
    UsersConfused,
    /// The event loop does not notice that the keeper's socket has room again.
    KeeperWakeUpsLost,
    /// The event loop does not send new events to watchers.
    WatchWakeUpsLost,
    /// A new keeper gets nothing.
    EntriesNotResent,
    /// A new keeper does not get the message that its set is complete.
    CompleteNotSent,
    /// The keeper does not replace the entries of versions that are gone.
    ReplacementsIgnored,
    /// The keeper does not change manifests.
    UpdatesIgnored,
    /// The keeper loses entries of versions.
    EntriesLost,
    /// The keeper holds the descriptors of an entry in the wrong order.
    DescriptorsSwapped,
    /// The keeper confirms more than it has read.
    ConfirmedUnread,
    /// A bit of the last manifest changes.
    ManifestDamaged,
    /// The keeper forgets completed puts and deletes.
    RequestsForgotten,
    /// The keeper holds the last entry a second time, under another key.
    EntryRepeated,
    /// A new server ends all leases at once.
    NoGrace,
    /// A new server never ends leases that no client resumes.
    EndlessGrace,
    /// Each server starts with the same random numbers.
    TokensRepeated,
    /// A client repeats a request under another number.
    RequestsRenumbered,
    /// A client resumes nothing.
    LeasesNotResumed,
}
