//! The broker's metrics in the text format of Prometheus.

use std::{collections::BTreeMap, fmt::Display};

use vmmfd::{
    broker::{Metrics, Quota, UserTotal},
    internals::prefixed_uuid,
};

/// The metrics of a broker, or of a broker that does not answer.
pub(super) fn render(metrics: Option<&Metrics>) -> String {
    let mut text = Text::default();
    text.number("vmmfd_up", "Whether the broker answers", metrics.is_some().into());
    let Some(metrics) = metrics else { return text.0 };
    for (name, help, value) in [
        ("vmmfd_objects", "Names that the broker has", metrics.objects),
        ("vmmfd_versions", "Versions that the broker keeps, also without a name", metrics.versions),
        ("vmmfd_leases", "Leases that are held", metrics.leases),
        ("vmmfd_connections", "Connections to the broker, the exporter's own included", metrics.connections),
        ("vmmfd_watchers", "Connections that wait for events", metrics.watchers),
        ("vmmfd_open_descriptors", "Open descriptors of the broker", metrics.descriptors.used),
        ("vmmfd_max_descriptors", "The most descriptors that the broker may have open", metrics.descriptors.allowed),
        ("vmmfd_stored_descriptors", "Descriptors that the keeper holds", metrics.store.used),
        ("vmmfd_max_stored_descriptors", "The most descriptors that the keeper may hold", metrics.store.allowed),
        ("vmmfd_start_time_seconds", "When the broker's process started, since 1970", metrics.started_ms / 1000),
    ] {
        text.number(name, help, value);
    }
    let version = metrics.version.iter().map(|version| (labels(&[("version", version)]), 1));
    text.family("gauge", "vmmfd_build_info", "The version of the broker's program", version);
    let kind = [(labels(&[("kind", &metrics.store.kind)]), 1)];
    text.family("gauge", "vmmfd_store_info", "Which process holds the broker's descriptors", kind);
    text.users(metrics);
    text.limits("vmmfd_quota", "each user", metrics.quota.unwrap_or_default());
    text.limits("vmmfd_total_quota", "all users together", metrics.total_quota.unwrap_or_default());
    text.requests(metrics);
    text.0
}

/// Labels in braces.
fn labels(pairs: &[(&str, &dyn Display)]) -> String {
    let escaped =
        |value: &dyn Display| value.to_string().replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
    let pairs: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
    format!("{{{}}}", pairs.join(","))
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        self.0 += &format!("{name}{labels} {value}\n");
    }

    /// A metric with a sample for each set of labels.
    fn family(&mut self, kind: &str, name: &str, help: &str, samples: impl IntoIterator<Item = (String, u64)>) {
        self.0 += &format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
        samples.into_iter().for_each(|(labels, value)| self.sample(name, &labels, value));
    }

    fn number(&mut self, name: &str, help: &str, value: u64) {
        self.family("gauge", name, help, [(String::new(), value)]);
    }

    fn users(&mut self, metrics: &Metrics) {
        let totals = &metrics.totals;
        let claimed = totals.iter().flat_map(|total| total.devices.iter().map(move |of| (total.uid, of)));
        let claimed =
            claimed.map(|(uid, of)| (labels(&[("device", &prefixed_uuid(&of.device)), ("uid", &uid)]), of.bytes));
        self.family("gauge", "vmmfd_claimed_bytes", "Memory as its makers claim it, by device and user", claimed);
        for (name, help, count) in [
            ("vmmfd_user_objects", "Names that are a user's", (|of| of.objects) as fn(&UserTotal) -> u64),
            ("vmmfd_user_leases", "Leases that a user's processes hold", |of| of.leases),
            ("vmmfd_user_connections", "Connections of a user's processes", |of| of.connections),
        ] {
            self.family("gauge", name, help, totals.iter().map(|of| (labels(&[("uid", &of.uid)]), count(of))));
        }
        let mut claims = BTreeMap::new();
        for claim in metrics.claims.iter().flatten() {
            *claims.entry(claim.uid).or_default() += 1;
        }
        let claims = claims.into_iter().map(|(uid, count)| (labels(&[("uid", &uid)]), count));
        self.family("gauge", "vmmfd_user_claims", "Claims that a user's processes hold", claims);
    }

    /// The limits that are set.
    fn limits(&mut self, prefix: &str, whose: &str, limits: Quota) {
        for (key, what, limit) in [
            ("bytes", "Memory and tables, as claimed", limits.bytes),
            ("device_bytes", "Memory of a device, as claimed", limits.device_bytes),
            ("objects", "Names and earlier versions", limits.objects),
            ("leases", "Leases", limits.leases),
            ("connections", "Connections", limits.connections),
        ] {
            if let Some(limit) = limit {
                self.number(&format!("{prefix}_{key}"), &format!("{what}, that {whose} may have"), limit);
            }
        }
    }

    fn requests(&mut self, metrics: &Metrics) {
        let restarts = [(String::new(), metrics.restarts)];
        self.family("counter", "vmmfd_restarts_total", "Starts of a server with what another one had held", restarts);
        let requests = metrics.requests.iter();
        let requests = requests.map(|of| (labels(&[("verb", &of.verb), ("outcome", &of.outcome)]), of.count));
        self.family("counter", "vmmfd_requests_total", "Requests that this server has answered", requests);
        let help = "How long the broker took to answer, requested waits included";
        self.family("histogram", "vmmfd_request_seconds", help, []);
        for of in &metrics.durations {
            let bounds = of.bounds_us.iter().map(|us| (*us as f64 / 1e6).to_string()).chain(["+Inf".to_owned()]);
            let mut count = 0;
            for (bound, more) in bounds.zip(&of.counts) {
                count += more;
                self.sample("vmmfd_request_seconds_bucket", &labels(&[("verb", &of.verb), ("le", &bound)]), count);
            }
            let verb = labels(&[("verb", &of.verb)]);
            self.sample("vmmfd_request_seconds_sum", &verb, of.sum_us as f64 / 1e6);
            self.sample("vmmfd_request_seconds_count", &verb, count);
        }
    }
}
