//! A strict parser of metrics, for tests. It accepts only what OpenMetrics 1.0.0, or the text format 0.0.4 of
//! Prometheus, allows, and of that only what Pagemill uses: neither timestamps nor exemplars.

use std::collections::{BTreeMap, BTreeSet};

pub type LabelSet = BTreeMap<String, String>;

#[derive(Debug, Default)]
pub struct Family {
    pub kind: String,
    pub unit: String,
    pub help: Option<String>,
    pub samples: Vec<(LabelSet, f64)>,
}

impl Family {
    /// Returns the value of the sample whose label `name` is `value`.
    pub fn value(&self, name: &str, value: &str) -> Option<f64> {
        let has_label = |labels: &LabelSet| labels.get(name).is_some_and(|found| found == value);
        self.samples.iter().find(|(labels, _)| has_label(labels)).map(|(_, value)| *value)
    }
}

/// The families by name. In OpenMetrics the name of a counter's family has no `_total`.
pub type Families = BTreeMap<String, Family>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    OpenMetrics,
    Prometheus,
}

/// Parses the text of one response.
///
/// # Errors
///
/// The first line that is not allowed, and why.
pub fn parse(text: &str, dialect: Dialect) -> Result<Families, String> {
    let body = match dialect {
        Dialect::OpenMetrics => text.strip_suffix("# EOF\n").ok_or("the last line is not # EOF")?,
        Dialect::Prometheus => text,
    };
    if !body.is_empty() && !body.ends_with('\n') {
        return Err("the last line has no end".to_owned());
    }
    let (mut families, mut current) = (Families::new(), String::new());
    for line in body.split_terminator('\n') {
        parse_line(line, dialect, &mut families, &mut current).map_err(|why| format!("{why}: {line:?}"))?;
    }
    for (name, family) in &families {
        check_family(name, family, dialect).map_err(|why| format!("{name}: {why}"))?;
    }
    Ok(families)
}

fn parse_line(line: &str, dialect: Dialect, families: &mut Families, current: &mut String) -> Result<(), String> {
    let Some(description) = line.strip_prefix("# ") else {
        return parse_sample(line, dialect, families.get_mut(current).ok_or("a sample before its family")?, current);
    };
    let (word, rest) = description.split_once(' ').ok_or("an incomplete description")?;
    let (name, value) = rest.split_once(' ').ok_or("an incomplete description")?;
    check_name(name, true)?;
    if name != current {
        if families.contains_key(name) {
            return Err("a family in two places".to_owned());
        }
        name.clone_into(current);
    }
    let family = families.entry(name.to_owned()).or_default();
    if !family.samples.is_empty() {
        return Err("a description behind samples".to_owned());
    }
    match word {
        "TYPE" if family.kind.is_empty() && ["counter", "gauge", "info"].contains(&value) => family.kind = value.into(),
        "UNIT" if family.unit.is_empty() && dialect == Dialect::OpenMetrics && !value.is_empty() => {
            family.unit = value.into();
        }
        "HELP" if family.help.is_none() => family.help = Some(unescape(value, dialect == Dialect::OpenMetrics)?),
        _ => return Err("not allowed".to_owned()),
    }
    Ok(())
}

fn check_family(name: &str, family: &Family, dialect: Dialect) -> Result<(), String> {
    if family.kind.is_empty() || family.help.as_ref().is_none_or(String::is_empty) {
        return Err("no type or no help".to_owned());
    }
    if !family.unit.is_empty() && !name.ends_with(&format!("_{}", family.unit)) {
        return Err("the unit is no suffix of the name".to_owned());
    }
    if family.kind == "info" && (dialect == Dialect::Prometheus || !family.unit.is_empty()) {
        return Err("not allowed for an info".to_owned());
    }
    let is_counter = family.kind == "counter";
    if name.ends_with("_total") != (is_counter && dialect == Dialect::Prometheus) {
        return Err("a wrong suffix _total".to_owned());
    }
    let sets: BTreeSet<&LabelSet> = family.samples.iter().map(|(labels, _)| labels).collect();
    if sets.len() != family.samples.len() {
        return Err("two samples with the same labels".to_owned());
    }
    let is_allowed = |value: f64| value.is_finite() && (value >= 0.0 || family.kind == "gauge");
    if !family.samples.iter().all(|(_, value)| is_allowed(*value)) {
        return Err("a value that is not allowed".to_owned());
    }
    if family.kind == "info" && family.samples.iter().any(|(_, value)| *value != 1.0) {
        return Err("the value of an info is 1".to_owned());
    }
    Ok(())
}

fn check_name(name: &str, is_colon_allowed: bool) -> Result<(), String> {
    let is_letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_' || (is_colon_allowed && byte == b':');
    let is_valid =
        name.bytes().next().is_some_and(is_letter) && name.bytes().all(|byte| is_letter(byte) || byte.is_ascii_digit());
    if is_valid { Ok(()) } else { Err(format!("{name:?} is not a name")) }
}

fn parse_sample(line: &str, dialect: Dialect, family: &mut Family, family_name: &str) -> Result<(), String> {
    let name_end = line.find(['{', ' ']).ok_or("an incomplete sample")?;
    let suffix = match (dialect, family.kind.as_str()) {
        (Dialect::OpenMetrics, "counter") => "_total",
        (Dialect::OpenMetrics, "info") => "_info",
        _ => "",
    };
    if line[..name_end].strip_suffix(suffix) != Some(family_name) {
        return Err("a sample of another family".to_owned());
    }
    let mut labels = LabelSet::new();
    let mut rest = &line[name_end..];
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (name, after) = rest.split_once("=\"").ok_or("a label without a value")?;
            check_name(name, false)?;
            let end = end_of_quoted(after).ok_or("a value without an end")?;
            if labels.insert(name.to_owned(), unescape(&after[..end], true)?).is_some() {
                return Err("a label twice".to_owned());
            }
            let after = &after[end + 1..];
            match after.strip_prefix(',') {
                Some(next) => rest = next,
                None => {
                    rest = after.strip_prefix('}').ok_or("no end of the labels")?;
                    break;
                }
            }
        }
    }
    let value = rest.strip_prefix(' ').ok_or("no space before the value")?;
    if value.bytes().any(|byte| !byte.is_ascii_digit() && byte != b'.') {
        return Err("not a number that Pagemill writes".to_owned());
    }
    let value = value.parse().map_err(|_| "not a number")?;
    family.samples.push((labels, value));
    Ok(())
}

/// Returns the offset of the quotation mark that ends a quoted text.
fn end_of_quoted(text: &str) -> Option<usize> {
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\\' => drop(bytes.next()),
            b'"' => return Some(at),
            _ => {}
        }
    }
    None
}

/// Decodes escapes. With `is_quote_escaped`, a quotation mark must be escaped.
fn unescape(text: &str, is_quote_escaped: bool) -> Result<String, String> {
    let (mut result, mut characters) = (String::new(), text.chars());
    while let Some(character) = characters.next() {
        result.push(match (character, character == '\\') {
            (_, true) => match characters.next() {
                Some('n') => '\n',
                Some('\\') => '\\',
                Some('"') if is_quote_escaped => '"',
                other => return Err(format!("a wrong escape {other:?}")),
            },
            ('"', _) if is_quote_escaped => return Err("a quotation mark that is not escaped".to_owned()),
            (other, _) => other,
        });
    }
    Ok(result)
}

/// The parser must accept valid texts, and refuse each of the invalid ones.
#[test]
fn invalid_metrics_are_refused() {
    let valid = "# TYPE a_bytes counter\n# UNIT a_bytes bytes\n# HELP a_bytes B \\\"c\\\".\na_bytes_total{d=\"e\\\\\"} 1.5\n\
                 a_bytes_total 2\n# TYPE f info\n# HELP f F.\nf_info{v=\"1\"} 1\n# EOF\n";
    let families = parse(valid, Dialect::OpenMetrics).unwrap();
    assert_eq!(families["a_bytes"].value("d", "e\\"), Some(1.5));
    assert_eq!(families["a_bytes"].help.as_deref(), Some("B \"c\"."));
    let changes = [
        ("# EOF\n", ""),
        ("# EOF\n", "# EOF"),
        ("# EOF\n", "\n# EOF\n"),
        ("_total 2", "_total 2 "),
        ("_total 2", "_total -2"),
        ("_total 2", "_total NaN"),
        ("_total 2", "_total{d=\"e\\\\\"} 2"),
        ("_total 2", "_total{d=\"e\",d=\"f\"} 2"),
        ("a_bytes_total 2", "a_bytes 2"),
        ("a_bytes_total 2", "b_total 2"),
        ("{d=\"e\\\\\"}", "{d=\"e\\x\"}"),
        ("{d=\"e\\\\\"}", "{1=\"e\"}"),
        ("UNIT a_bytes bytes", "UNIT a_bytes seconds"),
        ("# UNIT a_bytes bytes", "# TYPE a_bytes counter"),
        ("TYPE a_bytes counter", "TYPE a_bytes histogram"),
        ("B \\\"c", "B \"c"),
        ("# HELP f F.\n", ""),
        ("# HELP f F.", "# HELP g F."),
        ("f_info{v=\"1\"} 1", "f_info{v=\"1\"} 2"),
        ("# TYPE f info\n# HELP f F.\n", "# TYPE f info\n# HELP f F.\n# HELP a_bytes X\n"),
    ];
    for (from, to) in changes {
        let changed = valid.replacen(from, to, 1);
        assert!(changed != valid && parse(&changed, Dialect::OpenMetrics).is_err(), "{from:?} -> {to:?}");
    }
    let plain = "# TYPE a_total counter\n# HELP a_total B \"c\".\na_total 1\n";
    assert_eq!(parse(plain, Dialect::Prometheus).unwrap()["a_total"].samples.len(), 1);
    for changed in [plain.replace("_total", ""), plain.to_owned() + "# EOF\n", plain.replace("B", "\\\"")] {
        assert!(parse(&changed, Dialect::Prometheus).is_err(), "{changed}");
    }
}
