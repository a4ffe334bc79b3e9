//! The broker's metrics in the text formats of Prometheus and OpenMetrics.

use std::fmt::{Display, Write};

use vmmfd::{
    broker::{Metrics, UserTotal},
    driver::{Backend, DEVICE_NAME},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Prometheus 0.0.4.
    Plain,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl Format {
    /// The format that an `Accept` header requests.
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

/// The metrics as text; only `vmmfd_up` if the broker does not answer.
pub(crate) fn render(metrics: Option<&Metrics>, format: Format) -> String {
    let mut text = Text { out: String::new(), format };
    text.gauge("vmmfd_up", "Whether the broker answers", u8::from(metrics.is_some()));
    if let Some(metrics) = metrics {
        text.metrics(metrics);
    }
    match format {
        Format::OpenMetrics => text.out + "# EOF\n",
        Format::Plain => text.out,
    }
}

struct Text {
    out: String,
    format: Format,
}

/// A metric, to which samples are added.
struct Family<'a> {
    out: &'a mut String,
    name: String,
}

impl Text {
    fn family(&mut self, name: &str, help: &str, kind: &str) -> Family<'_> {
        let total = format!("{name}_total");
        let (described, sampled) = match (kind, self.format) {
            ("counter", Format::OpenMetrics) => (name, total.as_str()),
            ("counter", Format::Plain) => (total.as_str(), total.as_str()),
            _ => (name, name),
        };
        // Writing to a string can't fail.
        let _ = writeln!(self.out, "# HELP {described} {help}\n# TYPE {described} {kind}");
        Family { name: sampled.to_owned(), out: &mut self.out }
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, help, "gauge").sample("", &[], value);
    }

    fn metrics(&mut self, metrics: &Metrics) {
        for (name, help, value) in [
            ("vmmfd_objects", "Names that the broker has", metrics.objects),
            ("vmmfd_versions", "Versions that the broker keeps, also without a name", metrics.versions),
            ("vmmfd_leases", "Leases that are held", metrics.leases),
            ("vmmfd_connections", "Connections to the broker, the exporter's own included", metrics.connections),
            ("vmmfd_watchers", "Connections that wait for events", metrics.watchers),
        ] {
            self.gauge(name, help, value);
        }
        self.users(metrics);
        self.limits(metrics);
        let (open, store) = (metrics.descriptors, &metrics.store);
        for (name, help, value) in [
            ("vmmfd_open_descriptors", "Open descriptors of the broker", open.used),
            ("vmmfd_max_descriptors", "The most descriptors that the broker may have open", open.allowed),
            ("vmmfd_stored_descriptors", "Descriptors in the store that outlives the broker's process", store.used),
            ("vmmfd_max_stored_descriptors", "The most descriptors that fit the store", store.allowed),
        ] {
            self.gauge(name, help, value);
        }
        if let Some(lost) = metrics.lost_versions {
            let help = "Versions that this process lost when it took over: not all of their memory had been kept";
            self.gauge("vmmfd_lost_versions", help, lost);
        }
        for (name, help, key, value) in [
            ("vmmfd_build_info", "The version of the broker's program", "version", metrics.version.as_deref()),
            ("vmmfd_store_info", "Who keeps the broker's descriptors", "kind", Some(store.kind.as_str())),
        ] {
            let Some(value) = value else { continue };
            self.family(name, help, "gauge").sample("", &[(key, value)], 1);
        }
        let help = "When the broker's process started, in seconds since 1970";
        self.gauge("vmmfd_start_time_seconds", help, float(metrics.started_ms as f64 / 1e3));
        let help = "Starts of a server with what another one had held";
        self.family("vmmfd_restarts", help, "counter").sample("", &[], metrics.restarts);
        self.requests(metrics);
    }

    fn requests(&mut self, metrics: &Metrics) {
        let help = "Requests that this process of the broker has answered";
        let mut requests = self.family("vmmfd_requests", help, "counter");
        for of in &metrics.requests {
            requests.sample("", &[("verb", &of.verb), ("outcome", &of.outcome)], of.count);
        }
        let help = "How long the broker took to answer, waits that were asked for included";
        let mut seconds = self.family("vmmfd_request_seconds", help, "histogram");
        for of in &metrics.durations {
            let verb = ("verb", of.verb.as_str());
            let bounds = of.bounds_us.iter().map(|us| float(*us as f64 / 1e6)).chain(["+Inf".to_owned()]);
            let mut count = 0_u64;
            let mut buckets = Vec::new();
            for (bound, of_bucket) in bounds.zip(&of.counts) {
                count = count.saturating_add(*of_bucket);
                buckets.push((bound, count));
            }
            seconds.sample("_sum", &[verb], float(of.sum_us as f64 / 1e6));
            seconds.sample("_count", &[verb], count);
            for (bound, count) in buckets {
                seconds.sample("_bucket", &[("le", &bound), verb], count);
            }
        }
    }

    fn users(&mut self, metrics: &Metrics) {
        let help = "Memory that the broker keeps, as its makers claim it, by device and by user of the name";
        let mut claimed = self.family("vmmfd_claimed_bytes", help, "gauge");
        for total in &metrics.totals {
            for of in &total.devices {
                let backend = if of.device.name == DEVICE_NAME { Backend::Host } else { Backend::Cuda };
                let device = of.device.uuid.prefixed(backend);
                claimed.sample("", &[("device", &device), ("uid", &total.uid.to_string())], of.bytes);
            }
        }
        type Count = fn(&UserTotal) -> u64;
        let counts: [(&str, &str, Count); 3] = [
            ("vmmfd_user_objects", "Names that are a user's", |total| total.objects),
            ("vmmfd_user_leases", "Leases that a user's processes hold", |total| total.leases),
            ("vmmfd_user_connections", "Connections of a user's processes", |total| total.connections),
        ];
        for (name, help, count) in counts {
            let mut gauge = self.family(name, help, "gauge");
            for total in &metrics.totals {
                gauge.sample("", &[("uid", &total.uid.to_string())], count(total));
            }
        }
    }

    /// The quotas. A limit that is not set has no metric.
    fn limits(&mut self, metrics: &Metrics) {
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
                self.gauge(name, help, limit);
            }
        }
    }
}

impl Family<'_> {
    fn sample(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", label(value))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.out, "{}{suffix}{labels} {value}", self.name);
    }
}

/// A number in the format of OpenMetrics: integers have `.0`.
fn float(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.1}") } else { value.to_string() }
}

/// Replaces characters of a label value that would need escaping.
fn label(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || matches!(c, '"' | '\\') { '_' } else { c }).collect()
}
