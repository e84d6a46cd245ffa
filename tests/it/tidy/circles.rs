//! No folder of the crate depends on itself through other folders.
//!
//! A file depends on another if its code, outside modules that are compiled for tests only, names an item that the other
//! file defines: in a `use`, in a path such as `crate::error::ConfigError`, or by calling a macro. Names are followed
//! through re-exports to the file that defines them; a `pub use` by itself, a `mod` and the import of a whole module are no
//! dependencies.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use syn::{
    Arm, Attribute, Field, FieldValue, ImplItem, Item, ItemMacro, ItemUse, Local, Macro, TraitItem, Variant,
    Visibility,
    visit::{self, Visit},
};

use super::{
    assert_all_needed,
    source::{Source, Target, for_tests, is_re_export, leaves, paths_in},
};

/// The circles that are not resolved yet. Each line is a group of files; a circle among files of one group is tolerated.
const KNOWN: &[&[&str]] = &[];

/// Which files a file depends on, with the names of the items that it uses from each.
type Graph = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

fn dependencies(source: &Source) -> Graph {
    let mut graph = Graph::new();
    for (path, module) in &source.modules {
        let mut uses = Uses {
            source,
            path,
            found: BTreeMap::new(),
        };
        for item in &module.items {
            uses.visit_item(item);
        }
        uses.found.remove(&module.file);
        let edges = graph.entry(module.file.clone()).or_default();
        for (file, names) in uses.found {
            edges.entry(file).or_default().extend(names);
        }
    }
    graph
}

/// What the code of a module uses.
struct Uses<'a> {
    source: &'a Source,
    path: &'a [String],
    found: BTreeMap<String, BTreeSet<String>>,
}

impl Uses<'_> {
    fn add(&mut self, path: &[String]) {
        for target in self.source.resolve(self.path, path) {
            if let Target::Item { file, name } = target {
                self.found.entry(file).or_default().insert(name);
            }
        }
    }
}

/// Visits what is not compiled for tests only.
macro_rules! skip_tests {
    ($($visit:ident: $node:ty, $attributes:expr;)*) => {$(
        fn $visit(&mut self, node: &'ast $node) {
            let attributes: fn(&$node) -> &[Attribute] = $attributes;
            if !for_tests(attributes(node)) {
                visit::$visit(self, node);
            }
        }
    )*};
}

impl<'ast> Visit<'ast> for Uses<'_> {
    skip_tests! {
        visit_arm: Arm, |arm| &arm.attrs;
        visit_field: Field, |field| &field.attrs;
        visit_field_value: FieldValue, |field| &field.attrs;
        visit_local: Local, |local| &local.attrs;
        visit_variant: Variant, |variant| &variant.attrs;
        visit_item: Item, super::source::attributes;
        visit_impl_item: ImplItem, |item| match item {
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            _ => &[],
        };
        visit_trait_item: TraitItem, |item| match item {
            TraitItem::Const(item) => &item.attrs,
            TraitItem::Fn(item) => &item.attrs,
            TraitItem::Type(item) => &item.attrs,
            _ => &[],
        };
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    /// `pub(in crate::store)` is no use of the store.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_none() && !is_re_export(item) {
            for (_, path) in leaves(&item.tree) {
                self.add(&path);
            }
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let segments: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.add(&segments);
        }
        visit::visit_path(self, path);
    }

    fn visit_item_macro(&mut self, item: &'ast ItemMacro) {
        self.visit_macro(&item.mac);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.visit_path(&call.path);
        if let Some(name) = call.path.get_ident().map(ToString::to_string)
            && let Some(file) = self.source.macro_file(&name)
        {
            self.found
                .entry(file.to_owned())
                .or_default()
                .insert(format!("{name}!"));
        }
        for path in paths_in(call.tokens.clone()) {
            self.add(&path);
        }
    }
}

/// The shortest circles of a graph: for each dependency that is part of one, the shortest circle that it is part of.
fn circles(graph: &Graph) -> BTreeSet<Vec<String>> {
    let mut circles = BTreeSet::new();
    for (from, edges) in graph {
        for to in edges.keys() {
            if let Some(mut circle) = shortest_path(graph, to, from) {
                let first = circle
                    .iter()
                    .enumerate()
                    .min_by_key(|(_, file)| *file)
                    .map_or(0, |(index, _)| index);
                circle.rotate_left(first);
                circles.insert(circle);
            }
        }
    }
    circles
}

/// The files from one to another, both included.
fn shortest_path(graph: &Graph, from: &str, to: &str) -> Option<Vec<String>> {
    let (mut seen, mut next) = (BTreeSet::from([from]), VecDeque::from([vec![from.to_owned()]]));
    while let Some(path) = next.pop_front() {
        let file = path.last().expect("a path has a start");
        if file == to {
            return Some(path);
        }
        for dependency in graph.get(file).into_iter().flat_map(BTreeMap::keys) {
            if seen.insert(dependency) {
                let longer = path.iter().chain([dependency]).cloned().collect();
                next.push_back(longer);
            }
        }
    }
    None
}

/// A circle with the items that each file uses of the next.
fn describe(graph: &Graph, circle: &[String]) -> String {
    let nexts = circle.iter().cycle().skip(1);
    let lines = circle.iter().zip(nexts).map(|(file, next)| {
        let names: Vec<_> = graph[file][next].iter().map(String::as_str).collect();
        format!("  {file} uses {} of {next}\n", names.join(", "))
    });
    lines.collect()
}

fn is_known(circle: &[String]) -> bool {
    let contains = |group: &&[&str]| circle.iter().all(|file| group.contains(&file.as_str()));
    KNOWN.iter().any(contains)
}

/// The room of a file: its folder in `src`.
fn room(file: &str) -> String {
    file.split('/').take(2).collect::<Vec<_>>().join("/")
}

#[test]
fn no_room_depends_on_itself_through_others() {
    let files = dependencies(&Source::read("src"));
    assert!(files.len() > 50, "the files were found");
    let mut graph = Graph::new();
    for (file, uses) in files {
        for (other, names) in uses.into_iter().filter(|(other, _)| room(other) != room(&file)) {
            let edges = graph.entry(room(&file)).or_default();
            edges.entry(room(&other)).or_default().extend(names);
        }
    }

    let circles = circles(&graph);
    let new: Vec<_> = circles.iter().filter(|circle| !is_known(circle)).collect();
    let described: Vec<_> = new.iter().map(|circle| describe(&graph, circle)).collect();
    assert!(
        new.is_empty(),
        "{} circles between files; move what a file and its users share to a file of its own:\n\n{}",
        new.len(),
        described.join("\n")
    );

    let resolved = KNOWN.iter().filter(|group| {
        let is_in = |circle: &Vec<String>| circle.iter().all(|file| group.contains(&file.as_str()));
        !circles.iter().any(is_in)
    });
    let resolved: Vec<_> = resolved.map(|group| group.join(", ")).collect();
    assert_all_needed(resolved.iter().map(String::as_str), |_| false);
}

/// The circles of a crate of these files.
fn circles_of(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    circles(&dependencies(&Source::of(files))).into_iter().collect()
}

#[test]
fn two_files_that_use_each_other_are_a_circle() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use crate::b::B; pub struct A(B);"),
        ("b.rs", "pub struct B; fn f() { super::a::A::new() }"),
    ];
    assert_eq!(circles_of(&files), [["src/a.rs", "src/b.rs"]]);
}

#[test]
fn a_circle_is_found_over_several_files_and_printed_file_by_file() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "use crate::{b::{B, other}, d::D}; pub struct A;"),
        ("b.rs", "use super::c; pub struct B(c::C); pub fn other() {}"),
        ("c.rs", "pub struct C(Vec<Option<crate::a::A>>);"),
        ("d.rs", "pub struct D;"),
    ];
    let graph = dependencies(&Source::of(&files));
    let circles: Vec<_> = circles(&graph).into_iter().collect();
    assert_eq!(circles, [["src/a.rs", "src/b.rs", "src/c.rs"]]);
    let expected =
        "  src/a.rs uses B, other of src/b.rs\n  src/b.rs uses C of src/c.rs\n  src/c.rs uses A of src/a.rs\n";
    assert_eq!(describe(&graph, &circles[0]), expected);
}

#[test]
fn a_parent_that_only_re_exports_its_children_is_in_no_circle() {
    let files = [
        (
            "lib.rs",
            "mod store; pub use self::store::{Answer, Request as Asked}; pub use store::*;",
        ),
        (
            "store/mod.rs",
            "mod answer; mod request; pub use self::{answer::Answer, request::Request};",
        ),
        ("store/answer.rs", "use super::Request; pub struct Answer(Request);"),
        ("store/request.rs", "use super::answer; pub struct Request;"),
    ];
    assert!(circles_of(&files).is_empty());
}

#[test]
fn a_parent_that_uses_a_child_that_uses_the_parent_is_a_circle() {
    let files = [
        ("lib.rs", "mod store;"),
        (
            "store/mod.rs",
            "mod answer; pub use self::answer::Answer; pub trait Store { fn get() -> Answer; }",
        ),
        ("store/answer.rs", "use super::Store; pub struct Answer;"),
    ];
    assert_eq!(circles_of(&files), [["src/store/answer.rs", "src/store/mod.rs"]]);
}

#[test]
fn an_item_that_is_imported_through_other_modules_is_of_the_file_that_defines_it() {
    let through = [
        "use crate::B;",
        "use crate::re::B;",
        "use crate::re::Renamed;",
        "use crate::glob::B;",
        "use crate::*; type T = B;",
        "use super::private::B;",
        "use crate::re as r; type T = r::B;",
        "use super::b::{self as other}; type T = other::B;",
        "fn f() { use crate::b::B; }",
        "fn f() { let _ = matches!(1, crate::b::B::One); }",
        "macro_rules! m { () => { $crate::b::B } }",
        "made! { pub struct Made(crate::b::B); }",
        "use crate::b::made_there;",
        "fn f() { b!() }",
        "mod inner { fn f() -> super::super::b::B {} }",
        "impl From<u8> for crate::b::B {}",
    ];
    for a in through {
        let files = [
            ("lib.rs", "mod b; mod a; mod re; mod glob; mod private; pub use re::B;"),
            ("a.rs", &format!("{a} pub struct A;")),
            (
                "b.rs",
                "use crate::a::A; pub struct B; macro_rules! b { () => {} } functions! { made_there }",
            ),
            ("re.rs", "pub(crate) use crate::b::{B, B as Renamed};"),
            ("glob.rs", "pub use crate::b::*;"),
            ("private/mod.rs", "use crate::b::B;"),
        ];
        let circles = circles_of(&files);
        assert!(
            circles.contains(&vec!["src/a.rs".to_owned(), "src/b.rs".to_owned()]),
            "{a}: {circles:?}"
        );
    }
}

#[test]
fn what_is_no_use_of_a_file_is_no_dependency_on_it() {
    let without = [
        "#[cfg(test)] mod tests { use crate::b::B; }",
        "#[cfg(all(test, unix))] use crate::b::B;",
        "#[cfg(any(test, doctest))] fn f() -> crate::b::B {}",
        "enum E { One, #[cfg(test)] Two(crate::b::B) }",
        "impl A { #[cfg(test)] fn f() -> crate::b::B {} }",
        "fn f() { match 1 { #[cfg(test)] 2 => crate::b::B, _ => {} } }",
        "use crate::b;",
        "pub use crate::b::B;",
        "pub(in crate::b) struct X;",
        "/// [`B`](crate::b::B)\nstruct X;",
        "use ::b::B;",
        "fn f() { ::b::B; b::B; matches!(x, ::b::B) }",
    ];
    for a in without {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", &format!("{a} pub struct A;")),
            ("b.rs", "use crate::a::A; pub struct B;"),
        ];
        assert!(circles_of(&files).is_empty(), "{a}");
    }
    // `not(test)` and a choice that holds without tests are code.
    for a in [
        "#[cfg(not(test))] use crate::b::B;",
        "#[cfg(any(test, unix))] use crate::b::B;",
    ] {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", &format!("{a} pub struct A;")),
            ("b.rs", "use crate::a::A; pub struct B;"),
        ];
        assert_eq!(circles_of(&files).len(), 1, "{a}");
    }
}
