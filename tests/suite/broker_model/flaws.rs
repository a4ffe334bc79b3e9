//! The flaws that the search must detect.

/// A changed order or a missing check that the search must detect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    None,
    /// A put writes the catalogue before it sends the segments to the keeper.
    CatalogueBeforeStore,
    /// A put is acknowledged before it is in the catalogue.
    AnswerBeforeCatalogue,
    /// Segments are removed from the keeper before the catalogue records that their version is dropped.
    RemovalBeforeCatalogue,
    /// Segment numbers are reused before their removal is sent.
    RemovalAfterReuse,
    /// A repeated request is executed again.
    RequestsForgotten,
    /// Compaction drops the executed requests.
    RequestsForgottenByCompaction,
    /// Compaction writes the header before the records.
    HeaderFirst,
    /// A token alone is enough to resume a lease.
    TokenAlone,
    /// The tokens restart from zero with each server.
    TokensCounted,
    /// A start leaves unreferenced segments in the keeper.
    NothingRemovedAtTheStart,
    /// A start does not finish the interrupted drops of a killed server.
    NothingDroppedAtTheStart,
    /// A start trusts an incomplete set of segments, which the previous server did not finish sending to a new keeper.
    IncompleteSetTrusted,
    /// After the keeper's death, only the catalogues are sent to the next keeper.
    SegmentsNotStoredAnew,
    /// A lease is sent before it is in the catalogue.
    LeaseBeforeCatalogue,
    /// Leases are lost with the server.
    NoGrace,
    /// Leases without a connection never expire.
    EndlessGrace,
    /// A segment shared by two versions is freed with the first version.
    NoReferences,
}

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
