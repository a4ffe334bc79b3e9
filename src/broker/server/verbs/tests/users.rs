//! What each user may see, change and use.

use serde_json::{Value, json};

use super::*;
use crate::{
    broker::server::verbs::put::end_reservation,
    wire::broker::{Leases, Refusal},
};

const MAKER: u32 = 34_561;
const OTHER: u32 = 34_562;
/// A group of both users.
const TEAM: u32 = 34_570;

impl Fixture {
    fn user(&mut self, uid: u32) -> ConnectionId {
        self.client_as(uid, uid, &[])
    }

    /// The answer to a message of the kind that `make` wraps.
    fn tell<T: serde::de::DeserializeOwned>(
        &mut self,
        id: ConnectionId,
        make: impl FnOnce(T) -> Message,
        body: Value,
    ) -> Result<Message, Refusal> {
        answer(&self.ask(id, make(serde_json::from_value(body).unwrap())), id)
    }

    fn puts(&mut self, id: ConnectionId, name: &str, more: &str) -> Result<Message, Refusal> {
        answer(&self.put(id, name, more), id)
    }

    fn gets(&mut self, id: ConnectionId, object: Value) -> Result<Message, Refusal> {
        self.tell(id, |get| Message::Get(Box::new(get)), json!({ "objects": [object] }))
    }

    fn claims(&mut self, id: ConnectionId, object: Value) -> Result<Message, Refusal> {
        self.tell(id, |get| Message::Get(Box::new(get)), json!({ "objects": [object], "claim": {} }))
    }

    fn deletes(&mut self, id: ConnectionId, name: &str) -> Option<RefusalCode> {
        code(self.tell(id, Message::Delete, json!({ "name": name })))
    }

    fn lists(&mut self, id: ConnectionId) -> Vec<String> {
        match self.tell(id, Message::List, json!({ "prefix": "" })) {
            Ok(Message::Objects(page)) => page.objects.into_iter().map(|object| object.name).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn sees(&mut self, id: ConnectionId, prefix: &str) -> Leases {
        match self.tell(id, Message::Who, json!({ "prefix": prefix })) {
            Ok(Message::Leases(page)) => page,
            other => panic!("{other:?}"),
        }
    }

    /// Offers version 3 of a name back.
    fn offer(&mut self, id: ConnectionId, name: &str, owner: u32, version: u8) -> Seen {
        let of = format!("0c2b6d3a-7f0e-4f3c-9d4b-0000000000{version:02x}");
        let owner = json!({ "uid": owner, "gid": TEAM });
        let restore = json!({ "version": 3, "id": of, "created_ms": 1, "owner": owner, "leases": [] });
        self.put(id, name, &format!(r#", "mode": 420, "restore": {restore}"#))
    }

    fn offers(&mut self, id: ConnectionId, name: &str, owner: u32, version: u8) -> Option<RefusalCode> {
        let seen = self.offer(id, name, owner, version);
        code(answer(&seen, id))
    }
}

fn answer(seen: &Seen, id: ConnectionId) -> Result<Message, Refusal> {
    match seen.message(id) {
        Message::Refused(refusal) => Err(refusal),
        other => Ok(other),
    }
}

fn code(answer: Result<Message, Refusal>) -> Option<RefusalCode> {
    answer.err().map(|refusal| refusal.code)
}

#[test]
fn modes_decide_read_and_replace() {
    let mut test = Fixture::new();
    let maker = test.client_as(MAKER, TEAM, &[]);
    let modes = [0o600, 0o640, 0o644, 0o660, 0o666, 0o606, 0o066, 0o000, 0o622];
    let name = |mode: u32| format!("m{mode:03o}");
    for mode in modes {
        test.put(maker, &name(mode), &format!(r#", "mode": {mode}"#)).published(maker);
    }
    let many: Vec<u32> = (40_000..40_300).chain([TEAM]).collect();
    // The class of other users; the group, as main and as supplementary group; the owner.
    for (class, uid, gid, groups) in
        [(0, OTHER, OTHER, &[][..]), (3, OTHER, TEAM, &[]), (3, OTHER, OTHER, &many), (6, MAKER, MAKER, &[])]
    {
        let client = test.client_as(uid, gid, groups);
        let mut readable = Vec::new();
        for mode in modes {
            let (name, what) = (name(mode), format!("mode {mode:03o} as {uid}, {gid}"));
            let [reads, writes] = [4, 2].map(|bit| mode >> class & bit != 0);
            let refused = |allowed: bool| (!allowed).then_some(RefusalCode::Denied);
            assert_eq!(code(test.gets(client, json!({ "name": name }))), refused(reads), "{what}");
            assert_eq!(code(test.puts(client, &name, r#", "replace": true"#)), refused(writes), "{what}");
            // Only a put tells other users that the name exists.
            assert_eq!(code(test.puts(client, &name, "")), Some(RefusalCode::Exists), "{what}");
            if uid != MAKER {
                assert_eq!(test.deletes(client, &name), Some(RefusalCode::Denied), "{what}");
            }
            match test.tell(client, Message::Stat, json!({ "name": name })) {
                Ok(Message::Version(info)) if reads => {
                    // A replacement keeps owner, group and mode.
                    let owner = info.summary.owner;
                    assert_eq!((owner.uid, owner.gid, info.summary.mode), (MAKER, TEAM, mode as u16), "{what}");
                    assert!(!writes || info.parts[0].maker.uid == uid, "{what}");
                    readable.push(name);
                }
                other => assert_eq!(code(other), Some(RefusalCode::Denied), "{what}"),
            }
        }
        readable.sort();
        assert_eq!(test.lists(client), readable, "as {uid}, {gid}");
    }
    // Root and the server's user may do everything. Owners may delete objects that they can't read.
    for uid in [0, nix::unistd::geteuid().as_raw()] {
        let client = test.user(uid);
        assert_eq!(test.lists(client).len(), modes.len());
        assert_eq!(code(test.gets(client, json!({ "name": "m000" }))), None);
        assert_eq!(code(test.puts(client, "m000", r#", "replace": true"#)), None);
    }
    assert_eq!(test.deletes(maker, "m000"), None);
    let other_mode = test.puts(maker, "m600", r#", "replace": true, "mode": 438"#).unwrap_err();
    assert!(other_mode.message.contains("0600") && other_mode.message.contains("0666"), "{}", other_mode.message);
}

#[test]
fn unmapped_user_owns_nothing() {
    let mut test = Fixture::new();
    let (maker, overflow) = (test.user(MAKER), test.user(overflow_uid()));
    for (name, mode) in [("open", 0o644), ("writable", 0o666), ("secret", 0o600)] {
        test.put(maker, name, &format!(r#", "mode": {mode}"#)).published(maker);
    }
    let denied = Some(RefusalCode::Denied);
    let refusal = test.puts(overflow, "mine", "").unwrap_err();
    assert!(refusal.message.contains("can't own objects"), "{}", refusal.message);
    assert_eq!(code(test.puts(overflow, "writable", r#", "replace": true"#)), denied);
    assert_eq!(code(test.claims(overflow, json!({ "name": "mine" }))), denied);
    assert_eq!(
        (test.deletes(overflow, "open"), code(test.gets(overflow, json!({ "name": "secret" })))),
        (denied, denied)
    );
    assert_eq!(code(test.gets(overflow, json!({ "name": "open" }))), None);
    assert_eq!(test.lists(overflow), ["open", "writable"]);
}

#[test]
fn leases_are_shown_to_holders_and_readers() {
    let mut test = Fixture::new();
    let [maker, other, root] = [MAKER, OTHER, 0].map(|uid| test.user(uid));
    for (name, mode) in [("secret", 0o600), ("open", 0o644)] {
        test.put(maker, name, &format!(r#", "mode": {mode}"#)).published(maker);
        test.get(maker, name, "").lease(maker);
    }
    for (client, names, users) in [
        (maker, &["secret", "open"][..], &[MAKER][..]),
        (other, &["open"], &[OTHER]),
        (root, &["secret", "open"], &[0, MAKER, OTHER]),
    ] {
        let page = test.sees(client, "");
        assert_eq!(page.leases.iter().map(|lease| &*lease.name).collect::<Vec<_>>(), names);
        assert!(page.leases.iter().all(|lease| lease.uid == MAKER));
        assert_eq!(page.totals.iter().map(|total| total.uid).collect::<Vec<_>>(), users);
    }
    let own = &test.sees(maker, "").totals[0];
    assert_eq!((own.objects, own.leases, own.devices[0].bytes), (2, 2, 2 * GRANULARITY));
}

#[test]
fn claims_need_the_right_to_put() {
    let mut test = Fixture::new();
    let (maker, other) = (test.user(MAKER), test.user(OTHER));
    for (name, mode) in [("secret", 0o600), ("readable", 0o644), ("writable", 0o666)] {
        test.put(maker, name, &format!(r#", "mode": {mode}"#)).published(maker);
    }
    for (object, granted) in [
        (json!({ "name": "secret", "version": 99 }), false),
        (json!({ "name": "secret", "newer_than": 1 }), false),
        (json!({ "name": "readable", "newer_than": 1 }), false),
        (json!({ "name": "writable", "newer_than": 1 }), true),
        (json!({ "name": "free" }), true),
    ] {
        let claim = test.claims(other, object.clone());
        assert_eq!(code(claim), (!granted).then_some(RefusalCode::Denied), "{object}");
    }
    // Only readers learn whether a version exists.
    assert_eq!(code(test.gets(other, json!({ "name": "secret", "version": 99 }))), Some(RefusalCode::Denied));
}

#[test]
fn claims_are_shown_to_waiting_users() {
    let mut test = Fixture::new();
    let [claimer, other, waiting] = [0, OTHER, OTHER].map(|uid| test.user(uid));
    assert!(test.claims(claimer, json!({ "name": "secret/plan" })).is_ok());
    let mut shown = |client, prefix: &str| test.sees(client, prefix).claims.unwrap().len();
    assert_eq!(["", "secret", "secret/plan/a"].map(|prefix| shown(other, prefix)), [0; 3]);
    assert_eq!((shown(claimer, ""), shown(other, "secret/plan")), (1, 1));
    let refusal = test.gets(other, json!({ "name": "secret/plan" })).unwrap_err();
    assert!(refusal.message.ends_with("pid 1 of uid 0 has claimed it"), "{}", refusal.message);
    test.get(waiting, "secret/plan", r#", "wait_ms": 1000"#);
    assert_eq!(test.sees(other, "").claims.unwrap()[0].uid, 0);
}

#[test]
fn quotas_are_each_users_own() {
    let quota = Quota { objects: Some(2), leases: Some(1), bytes: Some(3 * GRANULARITY), ..Quota::default() };
    let mut test = Fixture::with(quota, 10_000);
    for uid in [MAKER, OTHER] {
        let client = test.user(uid);
        let [first, second, third] = [0, 1, 2].map(|at| format!("{uid}/{at}"));
        test.put(client, &first, "").published(client);
        test.put(client, &second, r#", "mode": 438"#).published(client);
        let refused = test.puts(client, &third, "").unwrap_err();
        let why = format!("uid {uid} has 2 objects and asks for 1 more, but its quota is 2");
        assert!(refused.code == RefusalCode::Quota && refused.message.starts_with(&why), "{}", refused.message);
        assert_eq!(code(test.claims(client, json!({ "name": third }))), Some(RefusalCode::Quota));
        // A lease keeps the replaced version, and its bytes count.
        test.get(client, &first, "").lease(client);
        assert_eq!(code(test.gets(client, json!({ "name": first }))), Some(RefusalCode::Quota));
        test.put(client, &first, r#", "replace": true"#).published(client);
        let refused = test.puts(client, &first, r#", "replace": true"#).unwrap_err();
        let why = "has 6 MiB (claimed) and asks for 2 MiB more, but its quota is 6 MiB";
        assert!(refused.message.contains(why), "{}", refused.message);
        assert_eq!(test.deletes(client, &first), None);
    }
    // The maker of a version pays for it, even if another user owns the name.
    let maker = test.user(MAKER);
    assert_eq!(code(test.puts(maker, &format!("{OTHER}/1"), r#", "replace": true"#)), None);
    assert_eq!(test.sees(maker, "").totals[0].devices[0].bytes, 3 * GRANULARITY);
}

#[test]
fn claims_of_a_user_are_bounded() {
    let mut test = Fixture::new();
    let [first, second] = [(); 2].map(|()| test.client());
    let mut claims = |client, number: u32| test.claims(client, json!({ "name": format!("a/{number}") }));
    (0..1024).for_each(|number| assert!(claims(if number % 2 == 0 { first } else { second }, number).is_ok()));
    let refusal = claims(first, 1024).unwrap_err();
    assert_eq!(refusal.code, RefusalCode::Quota);
    assert!(refusal.message.contains("has 1024 claims and asks for 1 more"), "{}", refusal.message);
    // Closed connections no longer count.
    disconnected(&mut test.state, second);
    assert!(test.claims(first, json!({ "name": "a/1" })).is_ok());
}

#[test]
fn kept_versions_count_as_objects() {
    let mut test = Fixture::with(Quota { objects: Some(10), ..Quota::default() }, 10_000);
    let maker = test.client();
    let keep = |keep: u32| format!(r#", "replace": true, "keep": {keep}"#);
    (0..10).for_each(|_| drop(test.put(maker, "a", &keep(64)).published(maker)));
    for name in ["a", "b"] {
        let refused = test.puts(maker, name, &keep(64)).unwrap_err();
        assert!(refused.message.contains("has 10 objects and asks for 1 more"), "{}", refused.message);
    }
    // Fewer kept versions free quota.
    test.put(maker, "a", &keep(3)).published(maker);
    test.put(maker, "b", "").published(maker);
    assert_eq!(test.state.objects.total().versions, 5);
}

/// Made-up devices fill no list: each user has few.
#[test]
fn devices_of_a_user_are_bounded() {
    let mut test = Fixture::new();
    let maker = test.client();
    let answers = (0..200).map(|device| {
        let device = format!("00000000-0000-0000-0000-{device:012x}");
        let mut part = part("all", 1);
        part["memory"]["device"]["uuid"] = json!(device);
        code(answer(&test.put_parts(maker, &format!("a/{device}"), &[part], Vec::new()), maker))
    });
    let answers: Vec<_> = answers.collect();
    assert!(answers[..128].iter().all(Option::is_none));
    assert!(answers[128..].iter().all(|code| *code == Some(RefusalCode::Quota)));
}

#[test]
fn only_owner_and_superuser_restore() {
    let mut test = Fixture::new();
    let [maker, other, root] = [MAKER, OTHER, 0].map(|uid| test.user(uid));
    let (denied, exists) = (Some(RefusalCode::Denied), Some(RefusalCode::Exists));
    for (client, name, owner, version, expected) in [
        (other, "a", MAKER, 1, denied),
        (other, "b", OTHER, 2, None),
        (maker, "a", MAKER, 1, None),
        // The version exists: a user who could have offered it learns that.
        (other, "a", OTHER, 3, exists),
        (other, "a", MAKER, 1, denied),
        (root, "c", MAKER, 4, None),
    ] {
        assert_eq!(test.offers(client, name, owner, version), expected, "{name}, version {version}");
    }
    let (_, version) = test.get(other, "c", "").lease(other);
    assert_eq!((version, test.state.objects.owner_of("c")), (3, Some(MAKER)));
    // A name that its owner deletes is not offered back.
    assert_eq!(test.deletes(maker, "a"), None);
    assert_eq!((test.offers(maker, "a", MAKER, 1), test.offers(maker, "a", MAKER, 5)), (denied, denied));
    assert_eq!(test.put(maker, "a", "").published(maker).version, 1);
}

#[test]
fn lost_names_wait_for_their_owners() {
    let mut test = Fixture::new();
    test.state.changes.reserves_names = true;
    let [maker, other, squatter] = [MAKER, OTHER, OTHER].map(|uid| test.user(uid));
    assert!(test.put(squatter, "x", "").messages(squatter).is_empty());
    assert!(test.put(other, "y", "").messages(other).is_empty());
    let seen = test.offer(maker, "x", MAKER, 1);
    assert_eq!((seen.published(maker).version, seen.refusal(squatter)), (3, RefusalCode::Exists));
    let seen = test.run(end_reservation);
    assert_eq!(seen.published(other).version, 1);
    assert_eq!(test.state.objects.owner_of("x"), Some(MAKER));
}

#[test]
fn request_token_belongs_to_one_name() {
    let mut test = Fixture::new();
    let maker = test.client();
    let request = |of: u8| json!({ "request": Token([of; 16]) }).to_string();
    let put = |of| format!(", {}", request(of).trim_matches(['{', '}']));
    let delete = |name: &str, of: u8| json!({ "name": name, "request": Token([of; 16]) });
    let invalid = Some(RefusalCode::Invalid);
    let first = test.put(maker, "a", &put(1)).published(maker);
    for is_deleted in [false, true] {
        assert_eq!(test.put(maker, "a", &put(1)).published(maker), first);
        assert_eq!(code(test.puts(maker, "b", &put(1))), invalid);
        assert_eq!(code(test.tell(maker, Message::Delete, delete("a", 2))), None, "repeated: {is_deleted}");
    }
    assert_eq!(code(test.tell(maker, Message::Delete, delete("b", 2))), invalid);
    assert_eq!(code(test.puts(maker, "b", &put(2))), invalid);
    assert_eq!(code(test.tell(maker, Message::Delete, delete("b", 1))), invalid);
    assert!(test.lists(maker).is_empty());
}
