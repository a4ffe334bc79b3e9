//! What a search must notice.

/// An order or a check that is changed, which the search must notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    None,
    /// A put writes the catalogue before it sends the segments to the keeper.
    CatalogueBeforeStore,
    /// A put is answered before it is written down.
    AnswerBeforeCatalogue,
    /// Segments are removed from the keeper before it is written down that their version is gone.
    RemovalBeforeCatalogue,
    /// The numbers of segments are given away again before their removal is sent.
    RemovalAfterReuse,
    /// A request that was done is done again when it is repeated.
    RequestsForgotten,
    /// Compaction forgets which requests were done.
    RequestsForgottenByCompaction,
    /// Compaction writes the header before the records.
    HeaderFirst,
    /// A lease is taken up by its token alone.
    TokenAlone,
    /// Tokens are counted from the start of the server.
    TokensCounted,
    /// A start leaves in the keeper what no version has.
    NothingRemovedAtTheStart,
    /// A start does not finish what a killed server began to give back.
    NothingDroppedAtTheStart,
    /// A start trusts a set of segments that the server before it had not sent whole to a new keeper.
    IncompleteSetTrusted,
    /// After the keeper's death the catalogues alone are sent to the next one.
    SegmentsNotStoredAnew,
    /// A lease is sent before it is written down.
    LeaseBeforeCatalogue,
    /// Leases end with the server.
    NoGrace,
    /// Leases that are not taken up stay.
    EndlessGrace,
    /// A segment that is in two versions is given back with the first.
    NoReferences,
}

/// All of them.
pub(super) const FLAWS: [Flaw; 17] = [
    Flaw::CatalogueBeforeStore,
    Flaw::AnswerBeforeCatalogue,
    Flaw::RemovalBeforeCatalogue,
    Flaw::RemovalAfterReuse,
    Flaw::RequestsForgotten,
    Flaw::RequestsForgottenByCompaction,
    Flaw::HeaderFirst,
    Flaw::TokenAlone,
    Flaw::TokensCounted,
    Flaw::NothingRemovedAtTheStart,
    Flaw::NothingDroppedAtTheStart,
    Flaw::IncompleteSetTrusted,
    Flaw::SegmentsNotStoredAnew,
    Flaw::LeaseBeforeCatalogue,
    Flaw::NoGrace,
    Flaw::EndlessGrace,
    Flaw::NoReferences,
];
