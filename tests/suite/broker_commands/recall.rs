//! `recall`, the recalls of `rm` and `put`, and `who --pinned`.

use super::*;

cases! {
    on crate::broker_commands::Broker; host and cuda: [
    recall_shows_who_acknowledged,
    rm_recalls_deleted_versions,
    put_recalls_earlier_versions,
    pinned_versions_are_largest_first,
    ]
}

/// A reader in this process that ends its lease when it is recalled.
fn heeding(broker: &Broker, name: &str) {
    let (client, lease) = broker.lease(name);
    let (send, receive) = mpsc::channel();
    lease.on_recall(move || send.send(()).unwrap()).unwrap();
    thread::spawn(move || {
        receive.recv().unwrap();
        drop((lease, client));
    });
}

fn recall_shows_who_acknowledged(broker: Broker) {
    broker.put("a", &data(10), &[]);
    let ignoring = broker.lease("a");
    heeding(&broker, "a");
    let ended = broker.end(&["recall", "a", "--within", "2s"]);
    ended.code(4).says("error: 1 of 2 leases did not end within 2s, and can't be forced to: end the processes\n");
    let shown = lines(&ended);
    let (no, yes) = (format!("no {} ", process::id()), format!("yes {} ", process::id()));
    assert!(shown[0].starts_with("ACKNOWLEDGED PID ") && shown.len() == 4, "{shown:?}");
    assert!(shown[1].starts_with(&no) && shown[2].starts_with(&yes), "{shown:?}");
    assert_eq!(shown[3], "free no: the broker keeps it under its name");
    drop(ignoring);
    // Without a name, the memory is free.
    heeding(&broker, "a");
    broker.put("a", &data(10), &["--replace"]);
    let report = broker.json(&["recall", "a", "--earlier", "--within", "10m"]);
    assert_eq!((&report["holders"][0]["version"], &report["free"]), (&json!(1), &json!(true)), "{report}");
    assert!(broker.refusal(&["recall", "a", "--version", "1"], 1, "object").contains("no object `a`"));
}

fn rm_recalls_deleted_versions(broker: Broker) {
    for name in ["a", "b"] {
        broker.put(name, &data(10), &[]);
        heeding(&broker, name);
    }
    let report = broker.json(&["rm", "a", "b", "--recall", "--within", "10m"]);
    assert_eq!((&report["deleted"], &report["held"]), (&json!(["a", "b"]), &json!([])));
    assert_eq!((report["recall"]["holders"].as_array().unwrap().len(), &report["recall"]["free"]), (2, &json!(true)));
}

fn put_recalls_earlier_versions(broker: Broker) {
    broker.put("a", &data(10), &[]);
    heeding(&broker, "a");
    let report = broker.put("a", &data(10), &["--replace", "--recall-old", "--within", "10m"]);
    assert_eq!((&report["version"], &report["recall"]["free"]), (&json!(2), &json!(true)));
    // The put succeeds even if the recall does not. `rm` reports who holds the memory.
    let ignoring = broker.lease("a");
    let file = broker.file("input", &data(10));
    let ended = broker.end(&["put", "a", "--from", text(&file), "--replace", "--recall-old", "--within", "50ms"]);
    ended.code(4).says("error: 1 of 1 lease did not end within 50ms");
    assert!(ended.stdout.starts_with("put        a version 3: ") && ended.stdout.ends_with("processes hold it\n"));
    let report = broker.end(&["rm", "a", "--recall", "--within", "50ms", "--json"]).code(4).json();
    assert_eq!((&report["held"][0]["name"], &report["error"]["kind"]), (&json!("a"), &json!("peer")), "{report}");
    drop(ignoring);
}

fn pinned_versions_are_largest_first(broker: Broker) {
    assert_eq!(broker.end(&["who", "--pinned"]).code(0).stderr, "notice: readers alone keep no version\n");
    let held: Vec<_> = [10, 5 << 20, 3 << 20]
        .into_iter()
        .map(|size| {
            broker.put("a", &data(size), &["--replace"]);
            broker.lease("a")
        })
        .collect();
    let shown = broker.json(&["who", "--pinned"]);
    let versions = |field: &str| -> Vec<Value> {
        shown[field].as_array().unwrap().iter().map(|one| one["version"].clone()).collect()
    };
    // The name keeps its current version. The others have only their readers, although they have numbers.
    assert_eq!((versions("unnamed"), versions("leases")), (vec![json!(2), json!(1)], vec![json!(2), json!(1)]));
    assert_eq!((&shown["users"], &shown["claims"]), (&json!([]), &json!([])));
    broker.end(&["rm", "a"]).code(0);
    let table = lines(&broker.end(&["who", "a", "--pinned"]));
    let sizes: Vec<&str> = table.iter().rev().take(3).map(|row| row.split(' ').next().unwrap()).collect();
    assert_eq!((table[0].as_str(), sizes.as_slice()), ("Leases:", &["2", "4", "6"][..]), "{table:?}");
    drop(held);
}
