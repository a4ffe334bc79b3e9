//! Gets of several objects, of parts and of a lease's memory; late answers.

use super::*;

/// Requests a lease, or memory of a lease.
fn select(test: &mut Fixture, id: ConnectionId, object: Value) -> Seen {
    let get = serde_json::from_value(json!({ "objects": [object] })).unwrap();
    test.ask(id, Message::Get(Box::new(get)))
}

#[test]
fn get_of_lease_selects_its_memory() {
    let mut test = Fixture::new();
    let (maker, reader) = (test.client(), test.client());
    test.put(maker, "a", "");
    let (token, _) = select(&mut test, reader, json!({"name": "a", "parts": {}})).lease(reader);
    test.put(maker, "a", r#", "replace": true"#);
    let of = |more: Value| {
        let mut object = json!({"name": "a", "lease": token});
        object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        object
    };
    // From the leased version, which is no longer current.
    let seen = select(&mut test, reader, of(json!({"parts": {"all": [{"offset": 0, "length": 1}]}})));
    let Message::Lease(lease) = seen.message(reader) else { panic!() };
    assert_eq!((lease.token, lease.version, lease.sizes.len()), (token, 1, 1));
    assert_eq!(test.leases(), 1);
    for (more, code) in [
        (json!({"parts": {"all": [{"offset": GRANULARITY, "length": 1}]}}), RefusalCode::Differs),
        (json!({"parts": {"all": [{"offset": 1, "length": u64::MAX}]}}), RefusalCode::Differs),
        (json!({"parts": {"all": [{"offset": 1, "length": 0}]}}), RefusalCode::Differs),
        (json!({"parts": {"y": []}}), RefusalCode::Lacks),
        (json!({"name": "b"}), RefusalCode::Absent),
        (json!({"lease": Token([1; 16])}), RefusalCode::Absent),
    ] {
        assert_eq!(select(&mut test, reader, of(more)).refusal(reader), code);
    }
    assert_eq!(select(&mut test, maker, of(json!({}))).refusal(maker), RefusalCode::Absent);
    assert_eq!(test.leases(), 1);
    test.ask(reader, Message::Release(serde_json::from_value(json!({ "token": token })).unwrap()));
    assert_eq!(select(&mut test, reader, of(json!({}))).refusal(reader), RefusalCode::Absent);
    assert_eq!((test.leases(), test.state.objects.total().versions), (0, 1));
}

#[test]
fn wrong_tables_are_refused_unread() {
    let mut test = Fixture::new();
    let maker = test.client();
    let unsealed = memfd::empty(c"table").unwrap();
    nix::unistd::ftruncate(&unsealed, 2).unwrap();
    let pipe = || nix::unistd::pipe().unwrap().0;
    for (fd, length) in [(unsealed, 2), (pipe(), 2), (table::sealed("{}").unwrap(), 3), (table::sealed("").unwrap(), 0)]
    {
        let more = format!(r#", "metadata": {{"length": {length}}}"#);
        let seen = test.put_fds(maker, "a", &more, vec![fd, memory()]);
        assert_eq!((seen.refusal(maker), seen.closed()), (RefusalCode::Invalid, 2), "{length}");
    }
    // Only readers read it.
    test.put_fds(maker, "a", r#", "metadata": {"length": 7}"#, vec![table::sealed("garbage").unwrap(), memory()])
        .published(maker);
}

#[test]
fn get_of_several_waits_for_all() {
    let mut test = Fixture::new();
    let (maker, reader) = (test.client(), test.client());
    test.put(maker, "a", "");
    let both = json!({ "objects": [{ "name": "a", "version": 2 }, { "name": "b" }], "wait_ms": 1000 });
    let seen = test.ask(reader, Message::Get(Box::new(serde_json::from_value(both).unwrap())));
    assert!(seen.messages(reader).is_empty());
    assert!(test.put(maker, "b", "").messages(reader).is_empty());
    let seen = test.put(maker, "a", r#", "replace": true"#);
    let versions = seen.messages(reader).into_iter().map(|message| match message {
        Message::Lease(lease) => (lease.name, lease.version),
        other => panic!("{other:?}"),
    });
    assert_eq!(versions.collect::<Vec<_>>(), [("a".to_owned(), 2), ("b".to_owned(), 1)]);
}

/// The answer waits for the client's socket, and the name is deleted meanwhile.
#[test]
fn late_stat_has_its_own_metadata() {
    let mut test = Fixture::new();
    let maker = test.client();
    let text = json!({ "x": "x".repeat(10_000) }).to_string();
    let metadata = format!(r#", "metadata": {{"length": {}}}"#, text.len());
    let seen = test.put_fds(maker, "a", &metadata, vec![table::sealed(&text).unwrap(), memory()]);
    seen.published(maker);
    let stat = Stat { name: "a".to_owned(), version: None };
    let mut seen = test.ask(maker, Message::Stat(stat));
    test.ask(maker, Message::Delete(Delete { name: "a".to_owned(), request: None }));
    drop(test.state.objects.take_garbage());
    let Some(Effect::Send { records, .. }) = seen.0.pop() else { panic!("no answer") };
    let own = records[0].own.first().unwrap();
    assert_eq!(table::read(own.try_clone().unwrap(), text.len() as u64, 1 << 20).unwrap(), text.as_bytes());
}

/// A late acknowledgement must not send the memory of another object.
#[test]
fn early_release_ends_connection() {
    let mut test = Fixture::new();
    let (maker, reader) = (test.client(), test.client());
    test.put(maker, "a", "").published(maker);
    let get = Message::Get(Box::new(serde_json::from_str(r#"{"objects": [{"name": "a"}]}"#).unwrap()));
    handle(&mut test.state, reader, get, Vec::new());
    let (token, _) = Seen(std::mem::take(&mut test.state.effects).0.into()).lease(reader);
    let release = Message::Release(serde_json::from_value(json!({ "token": token })).unwrap());
    assert_eq!(test.ask(reader, release).ends(reader), Some(ErrorCode::Protocol));
}

/// Each restart lets clients resume leases for 10 s. A replaced version without a lease stays for 10 s, even if servers restart all the time.
#[test]
fn restarts_do_not_keep_replaced_versions() {
    let mut test = Fixture::new();
    let maker = test.client();
    test.put(maker, "a", "");
    let mut longest = 0;
    for _ in 0..12 {
        test.restart(4000);
        let maker = test.client();
        test.put(maker, "a", r#", "replace": true"#).published(maker);
        longest = longest.max(test.state.objects.total().versions);
    }
    assert_eq!(longest, 4, "the current version, and those of the last 10 s");
}

#[test]
fn resumed_lease_keeps_version_through_restarts() {
    let mut test = Fixture::new();
    let (maker, reader) = (test.client(), test.client());
    let Published { id, .. } = test.put(maker, "a", "").published(maker);
    let (token, _) = test.get(reader, "a", "").lease(reader);
    for _ in 0..5 {
        test.restart(4000);
        let (maker, reader) = (test.client(), test.client());
        // Replaced before the reader is back.
        test.put(maker, "a", r#", "replace": true"#).published(maker);
        let lease = json!({ "token": token, "id": id, "size": 1 });
        let resume = json!({ "leases": [lease] });
        let seen = test.ask(reader, Message::Resume(serde_json::from_value(resume).unwrap()));
        assert!(matches!(seen.message(reader), Message::Resumed(resumed) if resumed.lost.is_empty()));
    }
}
