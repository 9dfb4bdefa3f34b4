//! a-tree on one set: match-atree FILTERS DOCUMENTS SECONDS ANSWERS; prints one line of JSON.
//!
//! FILTERS has an expression a line, DOCUMENTS a JSON object a line. The attributes are those of the documents.
//! ANSWERS gets the line numbers of the filters that match, a document a line.

use a_tree::{ATree, AttributeDefinition};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::time::Instant;

fn resident() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<f64>().unwrap() * 4096.0
}

extern "C" {
    fn clock() -> std::ffi::c_long; // of the C library: microseconds on POSIX systems
}

/// Seconds of processor time of this process, which has one thread.
fn cpu() -> f64 {
    unsafe { clock() as f64 / 1e6 }
}

fn search<'a>(tree: &'a ATree<u64>, document: &Map<String, Value>) -> Vec<u64> {
    let mut builder = tree.make_event();
    for (name, value) in document {
        match value {
            Value::String(text) => builder.with_string(name, text).unwrap(),
            Value::Number(number) => builder.with_integer(name, number.as_i64().unwrap()).unwrap(),
            Value::Array(items) => {
                let numbers: Vec<i64> = items.iter().map(|item| item.as_i64().unwrap()).collect();
                builder.with_integer_list(name, &numbers).unwrap()
            }
            _ => panic!("unexpected value of {name}"),
        }
    }
    let event = builder.build().unwrap();
    tree.search(&event).unwrap().matches().iter().map(|id| **id).collect()
}

/// Documents a second: the best of as many blocks as fit, with no clock read inside a block, as in match_workload.py.
fn item_rate(tree: &ATree<u64>, documents: &[Map<String, Value>], seconds: f64) -> f64 {
    let run = |count: usize| {
        let started = cpu();
        for document in documents.iter().cycle().take(count) {
            std::hint::black_box(search(tree, document));
        }
        cpu() - started
    };
    let mut count = 20;
    while run(count) < 0.05 {
        count *= 2;
    }
    let (began, mut best) = (Instant::now(), 0f64);
    while best == 0.0 || began.elapsed().as_secs_f64() < seconds {
        best = best.max(count as f64 / run(count));
    }
    best
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let filters = std::fs::read_to_string(&arguments[1]).unwrap();
    let filters: Vec<&str> = filters.lines().collect();
    let documents: Vec<Map<String, Value>> = std::fs::read_to_string(&arguments[2])
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let mut kinds = BTreeMap::new();
    for document in &documents {
        for (name, value) in document {
            kinds.insert(name.clone(), value.clone());
        }
    }
    let definitions: Vec<AttributeDefinition> = kinds
        .iter()
        .map(|(name, value)| match value {
            Value::String(_) => AttributeDefinition::string(name),
            Value::Array(_) => AttributeDefinition::integer_list(name),
            _ => AttributeDefinition::integer(name),
        })
        .collect();
    let mut tree = ATree::<u64>::new(&definitions).unwrap();
    let (memory, started) = (resident(), cpu());
    for (number, filter) in filters.iter().enumerate() {
        tree.insert(&(number as u64), filter).unwrap();
    }
    let register = filters.len() as f64 / (cpu() - started);
    let bytes = (resident() - memory) / filters.len() as f64;
    let seconds: f64 = arguments[3].parse().unwrap();
    let mut answers = String::new();
    for document in &documents {
        let mut found = search(&tree, document);
        found.sort();
        let texts: Vec<String> = found.iter().map(u64::to_string).collect();
        answers += &(texts.join(" ") + "\n");
    }
    let objects = item_rate(&tree, &documents, seconds);
    std::fs::write(&arguments[4], answers).unwrap();
    println!("{{\"register\": {register}, \"bytes\": {bytes}, \"objects\": {objects}}}");
}
