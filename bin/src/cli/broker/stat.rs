//! `stat`: shows an object.

use vmmfd::{
    broker::{Lifetime, Maker, ObjectInfo, PartInfo, ReportInfo, VersionInfo},
    driver::DEVICE_NAME,
    wire,
};

use super::{
    MeetBroker, count,
    fields::{age, field, process, time},
    ls::mode,
    shown, total,
};
use crate::{
    cli::prelude::*,
    units::{self, bytes},
};

/// The longest metadata that the text shows, in characters.
const MOST_METADATA: usize = 2000;

/// Shows an object: versions, metadata, parts, reports of readers
///
/// Sizes and devices are claims of the makers: the broker has no driver to check them. If a reader's driver rejects a size, the reader
/// reports it, and the report appears here.
#[derive(Debug, Args)]
#[command(after_help = exit_codes!("shown", "no such object or version"; 2 4 5 130))]
pub(in super::super) struct StatOptions {
    /// Name of the object
    #[arg(value_name = "NAME")]
    name: String,

    /// Version to show [default: the current one]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Object")]
    version: Option<u64>,

    #[command(flatten)]
    meet: MeetBroker,
}

impl Tool for StatOptions {
    const NAME: &'static str = "stat";

    const REPORTS: &'static [Named] = &[("stat", document::<Stamped<ObjectInfo>>)];

    fn run(&self, Running { output, cancel, .. }: Running<'_>) -> anyhow::Result<ToolOutput> {
        let info = self.meet.connect(cancel)?.stat(&self.name, self.version)?;
        Ok(ToolOutput::of(output, Exit::Verified, info, render))
    }
}

fn render(info: &ObjectInfo, verbose: bool) -> String {
    let ObjectInfo { version, metadata, .. } = info;
    let VersionInfo { summary: object, versions, lifetime, keep, parts, reports, .. } = version;
    let versions: Vec<String> = versions.iter().map(u64::to_string).collect();
    let mut text = field("name", &object.name);
    text += &field("version", format!("{}, id {}; available: {}", object.version, object.id, versions.join(", ")));
    text += &field(
        "size",
        format!("{} of data in {} of memory, as claimed", bytes(object.size), bytes(total(&object.devices))),
    );
    text += &field("backend", &object.backend);
    text += &field("owner", format!("uid {}, gid {}, mode {}", object.owner.uid, object.owner.gid, mode(object)));
    text += &field("created", format!("{}, {} ago", time(object.created_ms), age(object.created_ms)));
    text += &field("lifetime", described(*lifetime));
    if *keep > 0 {
        text += &field("keep", format!("{} before the current one", count(u64::from(*keep), "version")));
    }
    text += &field("leases", object.leases.to_string());
    if !metadata.is_empty() {
        text += &field("metadata", shortened(&info.metadata_text()));
    }
    for part in parts {
        text += &part_line(part, verbose);
    }
    for ReportInfo { reader, at_ms, message } in reports {
        text += &field("report", format!("{} by {}: {message}", time(*at_ms), maker(reader)));
    }
    text
}

fn part_line(part: &PartInfo, verbose: bool) -> String {
    let PartInfo { name, memory, arrays, digest, maker } = part;
    let wire::Memory { device, location, size, segments, .. } = memory;
    let mut line = format!("{name}: {} on {}", bytes(*size), shown(device, verbose));
    if *location == wire::Placement::Host && device.name != DEVICE_NAME {
        line += ", host memory";
    }
    if *segments > 1 {
        line += &format!(", {}", count(*segments, "segment"));
    }
    if *arrays > 0 {
        line += &format!(", {}", count(*arrays, "array"));
    }
    if let Some(digest) = digest {
        line += &format!(", {}", units::digest(digest, verbose));
    }
    field("part", format!("{line}; put by {}", self::maker(maker)))
}

fn maker(of: &Maker) -> String {
    process(of.pid, of.command.as_deref(), of.uid)
}

fn described(lifetime: Lifetime) -> String {
    match lifetime {
        Lifetime::Deleted => "until it is deleted".to_owned(),
        Lifetime::Maker => "while its maker is connected".to_owned(),
        Lifetime::Idle { ms } => {
            format!("{} after its last lease", humantime::format_duration(Duration::from_millis(ms)))
        }
        Lifetime::Leased => "while its maker is connected or a lease is held".to_owned(),
        _ => "unknown to this version".to_owned(),
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MOST_METADATA) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}... ({} bytes; --json has all)", &text[..end], text.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_metadata_is_cut_at_a_character() {
        let long = "\u{e4}".repeat(MOST_METADATA + 1);
        let short = shortened(&long);
        assert!(
            short.starts_with(&"\u{e4}".repeat(MOST_METADATA)) && short.ends_with("... (4002 bytes; --json has all)")
        );
        assert_eq!(shortened("{}"), "{}");
    }

    #[test]
    fn lifetimes_are_readable() {
        assert_eq!(described(Lifetime::Idle { ms: 90_500 }), "1m 30s 500ms after its last lease");
        assert_eq!(described(Lifetime::Deleted), "until it is deleted");
    }
}
