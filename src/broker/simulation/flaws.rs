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
