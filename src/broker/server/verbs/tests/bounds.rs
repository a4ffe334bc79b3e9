//! Contradictory puts, and the bounds of a user's memory in the server.

use super::*;

#[test]
fn tables_count_towards_quota() {
    let quota = Quota { bytes: Some(GRANULARITY + 100_000), ..Quota::default() };
    let mut test = Fixture::with(quota, 10_000);
    let maker = test.client();
    for (length, fits) in [(200_000, false), (90_000, true)] {
        let table = table::sealed(json!({ "x": "x".repeat(length - 8) }).to_string()).unwrap();
        let metadata = format!(r#", "metadata": {{"length": {length}}}"#);
        let seen = test.put_fds(maker, "a", &metadata, vec![table, memory()]);
        let expected = if fits { "published" } else { "refused" };
        assert_eq!(seen.message(maker).name(), expected);
    }
}

#[test]
fn reports_are_bounded() {
    let mut test = Fixture::new();
    let reader = test.client();
    let reports = (0..70).map(|name| {
        let name = format!("{name:02}");
        test.put(reader, &name, "");
        let (token, _) = test.get(reader, &name, "").lease(reader);
        for _ in 0..17 {
            let report = json!({ "token": token, "message": "x".repeat(60_000) });
            test.ask(reader, Message::Report(serde_json::from_value(report).unwrap()));
        }
        match test.ask(reader, Message::Stat(Stat { name, version: None })).message(reader) {
            Message::Version(info) => info.reports,
            other => panic!("{other:?}"),
        }
    });
    let reports: Vec<_> = reports.collect();
    assert_eq!((reports[0].len(), reports.iter().flatten().count()), (16, 1024));
    assert!(reports.iter().flatten().all(|report| report.message.len() < 300));
}

#[test]
fn contradictory_puts_are_refused() {
    let mut test = Fixture::new();
    let maker = test.client();
    let odd = |mapped: u64| {
        let mut part = part("all", 1);
        (part["memory"]["size"], part["memory"]["mapped_size"]) = (json!(mapped), json!(mapped));
        part
    };
    let table = |length: usize| json!({ "inline": { "x": "x".repeat(length - 8) } });
    let arrays = json!({ "inline": [{ "name": "n".repeat(900), "array": { "dtype": "uint8", "shape": [1] },
        "attributes": { "x": "x".repeat(1000) } }] });
    let many = (0..9).map(|at| {
        let mut part = part(&format!("p{at}"), 1);
        (part["arrays"], part["array_count"]) = (arrays.clone(), json!(1));
        part
    });
    let many = many.collect::<Vec<_>>();
    for (parts, sizes, metadata, words) in [
        (vec![odd(5000)], vec![5000], json!(null), "5000 bytes of memory"),
        (vec![part("all", 1)], vec![], json!(null), "1 to 1 are allowed"),
        (vec![part("all", 2)], vec![1 << 20, 3 << 20], json!(null), "segment 0 of part `all` has 1048576 bytes"),
        (vec![part("all", 1)], vec![GRANULARITY], table(4097), "4097 bytes in the record"),
        (many, vec![GRANULARITY; 9], json!(null), "in total"),
    ] {
        let fds = sizes.iter().map(|_| memory()).collect();
        let put = json!({ "name": "a", "backend": "host", "parts": parts, "sizes": sizes, "metadata": metadata });
        match test.put_text(maker, &put.to_string(), fds).message(maker) {
            Message::Refused(refusal) => {
                assert_eq!(
                    (refusal.code, refusal.message.contains(words)),
                    (RefusalCode::Invalid, true),
                    "{refusal:?}"
                );
            }
            other => panic!("{words}: {other:?}"),
        }
    }
    assert_eq!(test.state.objects.total().versions, 0);
}
