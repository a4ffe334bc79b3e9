//! The golden records of both protocols match the program, the pages and the schemas of the messages.

use vmmfd::wire::{ErrorCode, HEADER_LENGTH, broker};
use vmmfd_cli::check::{figures::Claim, files::Source};

use crate::support::{
    prelude::*,
    schema::{mismatch, of_message},
};

const PAGE: &str = include_str!("../../docs/protocol.md");
const BROKER_PAGE: &str = include_str!("../../docs/broker-protocol.md");
const RECORDS: &str = include_str!("../../docs/golden.json");
const BROKER_RECORDS: &str = include_str!("../../docs/broker-golden.json");

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    let list = value[name].as_array().unwrap();
    assert!(!list.is_empty(), "{name}");
    list
}

fn golden(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn bytes(hex: &Value) -> Vec<u8> {
    let digits = hex.as_str().unwrap().as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}"))
}

/// A decoded record: its kind, its number of descriptors, and the record that the program writes for it.
type Decoded = (&'static str, usize, Vec<u8>);

fn of_peers(record: &[u8], fds: usize) -> Result<Decoded, String> {
    let message = Message::decode(record, fds).map_err(|error| error.to_string())?;
    if let Message::Offer(offer) = &message {
        Claim::read(offer.check.as_ref()).unwrap().inspect(offer.access).unwrap();
    }
    Ok((message.name(), message.fd_count(), message.encode().unwrap()))
}

fn of_broker(record: &[u8], fds: usize) -> Result<Decoded, String> {
    let message = broker::Message::decode(record, fds).map_err(|error| error.to_string())?;
    let mut written = Vec::new();
    message.encode_into(&mut written).unwrap();
    Ok((message.name(), message.fd_count(), written))
}

fn check(golden: &Value, schema: &Value, decode: fn(&[u8], usize) -> Result<Decoded, String>) {
    let mut seen = BTreeSet::new();
    for record in list(golden, "records") {
        let name = &record["name"];
        let bytes = bytes(&record["hex"]);
        let fds = number(&record["descriptors"]) as usize;
        let (kind, count, written) = decode(&bytes, fds).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((kind, count), (record["kind"].as_str().unwrap(), fds), "{name}");
        let body: Value = serde_json::from_slice(&bytes[HEADER_LENGTH..]).unwrap();
        assert_eq!(body, record["body"], "{name}");
        // The order of the fields is specific to this implementation.
        assert_eq!(String::from_utf8_lossy(&written), String::from_utf8_lossy(&bytes), "{name}");
        assert_eq!(mismatch(&of_message(schema, kind), &body), None, "{name} does not fit its schema");
        seen.insert(kind);
    }
    let kinds = schema["$defs"].as_object().unwrap().keys().filter(|name| name.starts_with(char::is_lowercase));
    assert_eq!(seen, kinds.map(String::as_str).collect(), "each kind is there");
    for record in list(golden, "refused") {
        let decoded = decode(&bytes(&record["hex"]), number(&record["descriptors"]) as usize);
        assert!(decoded.is_err(), "{}: {decoded:?}", record["name"]);
        let rule = format!("**{}** ", record["rule"].as_str().unwrap());
        assert!(PAGE.contains(&rule), "{rule} is not on the page");
    }
}

#[test]
fn golden_records_match_the_program() {
    check(&golden(RECORDS), &Message::schema(), of_peers);
    check(&golden(BROKER_RECORDS), &broker::Message::schema(), of_broker);
}

#[test]
fn records_on_the_pages_are_golden() {
    for (page, text, count) in [(PAGE, RECORDS, 1), (BROKER_PAGE, BROKER_RECORDS, 2)] {
        let shown = page.split("byte for byte").last().unwrap().split("```").nth(1).unwrap();
        let hex = |text: &str| -> Option<Vec<u8>> {
            text.split_whitespace().map(|digits| u8::from_str_radix(digits, 16).ok()).collect()
        };
        let mut shown_records = Vec::<Vec<u8>>::new();
        for line in shown.lines().skip(1) {
            match line.split_once("     VMFD") {
                Some((head, _)) => shown_records.push(hex(head).unwrap()),
                // The text of the body beside its bytes.
                None if line.starts_with(' ') => {}
                None => {
                    let body = hex(line).unwrap_or_else(|| line.as_bytes().to_vec());
                    shown_records.last_mut().unwrap().extend(body);
                }
            }
        }
        assert_eq!(shown_records.len(), count);
        let golden = golden(text);
        for shown in shown_records {
            let known = list(&golden, "records").iter().any(|record| bytes(&record["hex"]) == shown);
            assert!(known, "on the page and not among the records: {}", String::from_utf8_lossy(&shown));
        }
    }
}

/// Asserts that the table of a section has these codes, and `width` columns.
fn check_codes(page: &str, section: &str, width: usize, is_code: fn(&str) -> bool, all: &str) {
    let table = page.split(section).nth(1).unwrap().split("## ").next().unwrap();
    let mut seen = BTreeSet::new();
    for row in table.lines().filter(|line| line.starts_with("| `")) {
        let row: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        assert!(row.len() == width && row.iter().all(|cell| !cell.is_empty()), "{row:?}");
        let name = row[0].trim_matches('`');
        assert!(is_code(name), "{name} is no code of this program");
        seen.insert(name);
    }
    assert_eq!(seen, all.split(' ').collect());
}

#[test]
fn pages_list_every_code() {
    let all = "version protocol refused backend device object access range full timeout interrupted failed";
    check_codes(PAGE, "## Errors", 4, |name| !matches!(ErrorCode::of(name), ErrorCode::Unknown(_)), all);
    let all = "absent exists version differs denied quota full timeout stopped invalid memory failed lacks";
    let is_code = |name: &str| !matches!(RefusalCode::of(name), RefusalCode::Unknown(_));
    check_codes(BROKER_PAGE, "## Refusals", 3, is_code, all);
}

/// The names of all fields in a schema.
fn fields<'a>(schema: &'a Value, into: &mut BTreeSet<&'a str>) {
    match schema {
        Value::Object(object) => {
            if let Some(Value::Object(properties)) = object.get("properties") {
                into.extend(properties.keys().map(String::as_str));
            }
            object.values().for_each(|inner| fields(inner, into));
        }
        Value::Array(values) => values.iter().for_each(|inner| fields(inner, into)),
        _ => {}
    }
}

#[test]
fn pages_name_every_field() {
    let schemas = [Message::schema(), broker::Message::schema()];
    let mut names = BTreeSet::new();
    schemas.iter().for_each(|schema| fields(schema, &mut names));
    assert!(names.len() > 100, "{names:?}");
    for name in names {
        let quoted = format!("`{name}`");
        assert!(PAGE.contains(&quoted) || BROKER_PAGE.contains(&quoted), "no page has {quoted}");
    }
}

#[test]
fn golden_values_match_the_program() {
    let golden = golden(RECORDS);
    let pattern = |value: &Value| Pattern::new(number(&value["salt"]).try_into().unwrap());
    for value in list(&golden, "words") {
        assert_eq!(u64::from(pattern(value).word(number(&value["index"]))), number(&value["word"]), "{value}");
    }
    for value in list(&golden, "bytes") {
        let mut written = vec![0xEE; number(&value["size"]) as usize];
        pattern(value).write(number(&value["offset"]), &mut written);
        assert_eq!(written, bytes(&value["hex"]), "{value}");
    }
    let folder = tempfile::tempdir().unwrap();
    for value in list(&golden, "digests") {
        let path = folder.path().join("data");
        let data = bytes(&value["hex"]);
        fs::write(&path, &data).unwrap();
        let digest = Source::open(&path).unwrap().digest(0..data.len() as u64, &mut || Ok(())).unwrap();
        assert_eq!(json!(digest), value["digest"]);
    }
    for value in list(&golden, "host_devices") {
        assert_eq!(json!(HostDriver::uuid_of(value["boot_id"].as_str().unwrap())), value["uuid"]);
    }
}
