//! The broker's figures in the text formats of Prometheus and of OpenMetrics.

use std::{fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text::encode},
    metrics::MetricType,
    registry::Registry,
};

use vmmfd::{
    broker::{Metrics, UserTotal},
    driver::{Backend, DEVICE_NAME},
};

/// A text format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Prometheus's own, version 0.0.4.
    Plain,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl Format {
    /// The one that a client asks for by its `Accept`.
    pub(crate) fn asked(accept: &str) -> Self {
        let open = accept.split(',').any(|kind| kind.trim().starts_with("application/openmetrics-text"));
        if open { Self::OpenMetrics } else { Self::Plain }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The figures as text: of a broker that does not answer, only that it does not.
pub(crate) fn render(metrics: Option<Metrics>, format: Format) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Arc::new(Figures(metrics))));
    let mut text = String::new();
    // A String takes everything.
    let _ = encode(&mut text, &registry);
    match format {
        Format::OpenMetrics => text,
        Format::Plain => plain(&text),
    }
}

/// The counters' names are other in the older format, whose types are those of the samples, and its end has no mark.
fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 64);
    let counters: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    for line in text.lines().filter(|line| *line != "# EOF") {
        let named = ["# HELP ", "# TYPE "].iter().find_map(|word| {
            let (name, rest) = line.strip_prefix(word)?.split_once(' ')?;
            counters.contains(&name).then(|| format!("{word}{name}_total {rest}"))
        });
        out.push_str(named.as_deref().unwrap_or(line));
        out.push('\n');
    }
    out
}

#[derive(Debug)]
struct Figures(Option<Metrics>);

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut begin = Begin(&mut encoder);
        begin.gauge("vmmfd_up", "Whether the broker answers")?.encode_gauge(&u32::from(self.0.is_some()))?;
        let Some(metrics) = &self.0 else { return Ok(()) };
        for (name, help, value) in [
            ("vmmfd_objects", "Names that the broker has", metrics.objects),
            ("vmmfd_versions", "Versions that the broker keeps, also without a name", metrics.versions),
            ("vmmfd_leases", "Leases that are held", metrics.leases),
            ("vmmfd_connections", "Connections to the broker, the exporter's own included", metrics.connections),
            ("vmmfd_watchers", "Connections that wait for events", metrics.watchers),
        ] {
            begin.gauge(name, help)?.encode_gauge(&value)?;
        }
        users(&mut begin, metrics)?;
        limits(&mut begin, metrics)?;
        let (open, store) = (metrics.descriptors, &metrics.store);
        for (name, help, value) in [
            ("vmmfd_open_descriptors", "Open descriptors of the broker", open.used),
            ("vmmfd_max_descriptors", "The most descriptors that the broker may have open", open.allowed),
            ("vmmfd_stored_descriptors", "Descriptors in the store that outlives the broker's process", store.used),
            ("vmmfd_max_stored_descriptors", "The most descriptors that fit the store", store.allowed),
        ] {
            begin.gauge(name, help)?.encode_gauge(&value)?;
        }
        if let Some(lost) = metrics.lost_versions {
            let help = "Versions that this process lost when it took over: not all of their memory had been kept";
            begin.gauge("vmmfd_lost_versions", help)?.encode_gauge(&lost)?;
        }
        for (name, help, key, value) in [
            ("vmmfd_build_info", "The version of the broker's program", "version", metrics.version.as_deref()),
            ("vmmfd_store_info", "Who keeps the broker's descriptors", "kind", Some(store.kind.as_str())),
        ] {
            let Some(value) = value.map(label) else { continue };
            begin.gauge(name, help)?.encode_family(&[(key, value)])?.encode_gauge(&1_u32)?;
        }
        let started = metrics.started_ms as f64 / 1e3;
        begin
            .gauge("vmmfd_start_time_seconds", "When the broker's process started, in seconds since 1970")?
            .encode_gauge(&started)?;
        begin
            .begin("vmmfd_restarts", "Starts of a server with what another one had held", MetricType::Counter)?
            .encode_counter::<NoLabelSet, _, f64>(&metrics.restarts, None)?;
        let mut requests = begin.begin(
            "vmmfd_requests",
            "Requests that this process of the broker has answered",
            MetricType::Counter,
        )?;
        for of in &metrics.requests {
            let labels = [("verb", label(&of.verb)), ("outcome", label(&of.outcome))];
            requests.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&of.count, None)?;
        }
        let mut seconds = begin.begin(
            "vmmfd_request_seconds",
            "How long the broker took to answer, waits that were asked for included",
            MetricType::Histogram,
        )?;
        for of in &metrics.durations {
            let bounds = of.bounds_us.iter().map(|us| *us as f64 / 1e6).chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(of.counts.iter().copied()).collect();
            let count = of.counts.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
            let labels = [("verb", label(&of.verb))];
            let sum = of.sum_us as f64 / 1e6;
            seconds.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }
}

/// Begins metrics.
struct Begin<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Begin<'_, '_> {
    fn gauge<'s>(&'s mut self, name: &'s str, help: &str) -> Result<MetricEncoder<'s>, fmt::Error> {
        self.begin(name, help, MetricType::Gauge)
    }

    fn begin<'s>(&'s mut self, name: &'s str, help: &str, kind: MetricType) -> Result<MetricEncoder<'s>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, kind)
    }
}

/// What is held for each user.
fn users(begin: &mut Begin<'_, '_>, metrics: &Metrics) -> fmt::Result {
    let mut claimed = begin.gauge(
        "vmmfd_claimed_bytes",
        "Memory that the broker keeps, as its makers claim it, by device and by user of the name",
    )?;
    for total in &metrics.totals {
        let uid = total.uid.to_string();
        for of in &total.devices {
            let backend = if of.device.name == DEVICE_NAME { Backend::Host } else { Backend::Cuda };
            let device = of.device.uuid.prefixed(backend);
            claimed.encode_family(&[("device", device.as_str()), ("uid", uid.as_str())])?.encode_gauge(&of.bytes)?;
        }
    }
    type Count = fn(&UserTotal) -> u64;
    let counts: [(&str, &str, Count); 3] = [
        ("vmmfd_user_objects", "Names that are a user's", |total| total.objects),
        ("vmmfd_user_leases", "Leases that a user's processes hold", |total| total.leases),
        ("vmmfd_user_connections", "Connections of a user's processes", |total| total.connections),
    ];
    for (name, help, count) in counts {
        let mut gauge = begin.gauge(name, help)?;
        for total in &metrics.totals {
            gauge.encode_family(&[("uid", total.uid.to_string())])?.encode_gauge(&count(total))?;
        }
    }
    Ok(())
}

/// What each user and all together may have. A limit that does not exist has no metric.
fn limits(begin: &mut Begin<'_, '_>, metrics: &Metrics) -> fmt::Result {
    let (user, total) = (metrics.quota.unwrap_or_default(), metrics.total_quota.unwrap_or_default());
    for (name, help, limit) in [
        ("vmmfd_quota_bytes", "Memory and tables that each user may have, as claimed", user.bytes),
        ("vmmfd_quota_device_bytes", "Memory of a device that each user may have, as claimed", user.device_bytes),
        ("vmmfd_quota_objects", "Names and earlier versions that each user may have", user.objects),
        ("vmmfd_quota_leases", "Leases that each user may hold", user.leases),
        ("vmmfd_quota_connections", "Connections that each user may have", user.connections),
        ("vmmfd_total_quota_bytes", "Memory and tables that all users may have, as claimed", total.bytes),
        (
            "vmmfd_total_quota_device_bytes",
            "Memory of a device that all users may have, as claimed",
            total.device_bytes,
        ),
        ("vmmfd_total_quota_objects", "Names and earlier versions that all users may have", total.objects),
        ("vmmfd_total_quota_leases", "Leases that all users may hold", total.leases),
        ("vmmfd_total_quota_connections", "Connections that all users may have", total.connections),
    ] {
        if let Some(limit) = limit {
            begin.gauge(name, help)?.encode_gauge(&limit)?;
        }
    }
    Ok(())
}

/// A label's value from what the broker sent: the encoder escapes nothing.
fn label(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || matches!(c, '"' | '\\') { '_' } else { c }).collect()
}
