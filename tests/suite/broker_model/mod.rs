//! A model of the broker: its catalogue, its keeper and its leases. The search kills the server at each step.
//!
//! `world` defines the state and its invariants, `steps` the transitions, and `search` visits every state. The bounds: two names, three
//! clients of two users, two kills of the server or its keeper, one kill of a client, one compaction. Each `Flaw` (a changed order or a
//! missing check) must be detected: otherwise the search proves nothing.

mod flaws;
mod replay;
mod search;
mod steps;
mod world;

use std::collections::BTreeSet;

use self::{
    flaws::{FLAWS, Flaw},
    search::{Searched, search},
    steps::{Action, Model},
    world::World,
};
use crate::broker_pages::number;

/// The limits: requests, kills of the server or the keeper, compactions, kills of clients.
type Bounds = (u8, u8, u8, u8);

fn world((requests, crashes, compactions, deaths): Bounds) -> World {
    World::new(requests, crashes, compactions, deaths)
}

/// The name of a step or an action, without its arguments.
fn kind(of: &impl std::fmt::Debug) -> String {
    let text = format!("{of:?}");
    text.split('(').next().unwrap_or_default().to_owned()
}

/// Searches a model without a flaw. Returns the steps before which the server was killed, and the other actions.
#[track_caller]
fn sound(bounds: Bounds) -> (Searched, BTreeSet<String>, BTreeSet<String>) {
    let (mut killed, mut happened) = (BTreeSet::new(), BTreeSet::new());
    let note = |world: &World, action: &Action| {
        happened.insert(kind(action));
        if let (Action::KillServer, Some(server)) = (action, &world.server) {
            killed.insert(server.steps.front().map_or_else(|| "Idle".to_owned(), kind));
        }
    };
    match search(Model { flaw: Flaw::None }, world(bounds), note) {
        Ok(searched) => {
            let Searched { states, depth } = &searched;
            eprintln!("{bounds:?}: {states} states, the last of them after {depth} actions");
            (searched, killed, happened)
        }
        Err(wrong) => panic!("{}, after {:#?}", wrong.what, wrong.actions),
    }
}

fn set(of: &[&str]) -> BTreeSet<String> {
    of.iter().copied().map(str::to_owned).collect()
}

/// `VMMFD_TEST_REQUESTS` sets the number of requests: each additional request takes ten times as long.
#[test]
fn nothing_acknowledged_is_lost() {
    let _turn = crate::support::cpu_turn();
    let requests = u8::try_from(number("VMMFD_TEST_REQUESTS", 3)).unwrap();
    let (searched, ..) = sound((requests, 2, 0, 0));
    assert!(searched.states > 100_000, "{searched:?}");
}

#[test]
fn compaction_and_cleanup_survive_server_kill() {
    let steps = ["Admit", "Answer", "Clear", "Copy", "Delete", "Drop", "End", "Hand", "Idle", "Lease", "Publish"];
    let steps: Vec<&str> = steps.into_iter().chain(["Refuse", "Remove", "Send", "Switch"]).collect();
    let actions = ["Ask", "Compact", "EndGrace", "KillClient", "KillServer", "Reconnect", "Release", "Start"];
    let actions: Vec<&str> = actions.into_iter().chain(["Step", "TakeForeign"]).collect();
    let bounds = (2, 2, 1, 1);
    let (_, killed, happened) = sound(bounds);
    assert_eq!(killed, set(&[&steps[..], &["SendCatalogues", "Complete"]].concat()));
    assert_eq!(happened, set(&[&actions[..], &["KillKeeper", "StoreAnew"]].concat()));
}

#[test]
fn changed_orders_are_detected() {
    let _turn = crate::support::cpu_turn();
    let (small, large) = ((2, 2, 1, 1), (3, 2, 0, 0));
    let flaws: &[(Flaw, Bounds, &str)] = &[
        (Flaw::CatalogueBeforeStore, small, "of version 0 is None"),
        (Flaw::AnswerBeforeCatalogue, small, "was answered as done, and is not"),
        (Flaw::RemovalBeforeCatalogue, small, "of version 0 is None"),
        (Flaw::RemovalAfterReuse, large, "stored as []"),
        (Flaw::RequestsForgotten, small, "is refused, and was done"),
        (Flaw::RequestsForgottenByCompaction, small, "is refused, and was done"),
        (Flaw::HeaderFirst, small, "and no request did it"),
        (Flaw::TokenAlone, small, "which it was not given"),
        (Flaw::TokensCounted, large, "leases version 0"),
        (Flaw::NothingRemovedAtTheStart, small, "is in 0 versions, and stored"),
        (Flaw::NothingDroppedAtTheStart, small, "a version stays"),
        (Flaw::IncompleteSetTrusted, small, "of version 0 is None"),
        (Flaw::SegmentsNotStoredAnew, small, "stored as []"),
        (Flaw::LeaseBeforeCatalogue, small, "can't take lease 0 up"),
        (Flaw::NoGrace, small, "can't take lease 0 up"),
        (Flaw::EndlessGrace, small, "stays, and no client has it"),
        (Flaw::NoReferences, small, "is None, not"),
    ];
    let tried: BTreeSet<String> = flaws.iter().map(|(flaw, ..)| format!("{flaw:?}")).collect();
    assert_eq!(tried, FLAWS.iter().map(|flaw| format!("{flaw:?}")).collect());
    for &(flaw, bounds, what) in flaws {
        match search(Model { flaw }, world(bounds), |_, _| {}) {
            Ok(searched) => panic!("{flaw:?} is not found in {searched:?}"),
            Err(wrong) => assert!(wrong.what.contains(what), "{flaw:?}: {wrong:#?}"),
        }
    }
}
