//! No match over algorithms or operations has a wildcard, so that the compiler names each place that a new one must be
//! added to.
//!
//! A match has a wildcard if an arm without a condition takes any variant. `matches!` and `if let` with an algorithm are
//! such matches, too.

use proc_macro2::{Group, TokenStream, TokenTree};
use syn::{
    Arm, Block, ExprLet, ExprMatch, ImplItemFn, Item, ItemFn, ItemImpl, ItemMacro, Local, Macro, Pat, TraitItemFn,
    Type,
    parse::{ParseStream, Parser},
    visit::{self, Visit},
};

use super::{
    assert_all_needed,
    source::{Source, Target, for_tests},
};

/// The enums, and the folders that define them.
const ENUMS: [(&str, &str); 3] = [
    ("Limit", "src/limit/"),
    ("State", "src/limit/"),
    ("Operation", "src/store/"),
];

/// Enums of algorithms.
const ALGORITHMS: [&str; 2] = ["Limit", "State"];

/// Functions that match with a wildcard, and why it is right for each variant to come.
const DELIBERATE: &[(&str, &str)] = &[
    (
        "src/decision/policy.rs permanent_denial",
        "a cost above the quota never fits, whatever the algorithm",
    ),
    (
        "src/limit/state.rs dispatch!",
        "each algorithm has an arm, and a state of another one is a mismatch",
    ),
    (
        "src/limiter/mod.rs undecided_by",
        "a policy applies by its cost, whatever the algorithm",
    ),
    (
        "src/store/redis/across_slots.rs decide",
        "an operation that is no check stays the same",
    ),
    (
        "src/store/uncounted.rs decide_apart",
        "an operation that is no check stays the same",
    ),
];

/// Functions with a wildcard that is still to be replaced.
const KNOWN: &[&str] = &[];

/// The functions that match with a wildcard: file, name.
fn wildcards(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for (path, module) in &source.modules {
        let mut matches = Matches {
            source,
            path,
            file: &module.file,
            function: String::new(),
            this: Vec::new(),
            found: &mut found,
        };
        module.items.iter().for_each(|item| matches.visit_item(item));
    }
    found.sort();
    found.dedup();
    found
}

struct Matches<'a> {
    source: &'a Source,
    path: &'a [String],
    file: &'a str,
    function: String,
    /// What `Self` is.
    this: Vec<String>,
    found: &'a mut Vec<String>,
}

/// A place in a pattern: the fields to it, from the outside, each with what it is a field of.
type Place = Vec<(String, String)>;

impl Matches<'_> {
    fn report(&mut self) {
        self.found.push(format!("{} {}", self.file, self.function));
    }

    /// The name of the enum, if it is one of ours and the path one of its variants.
    fn enum_of(&self, path: &syn::Path) -> Option<&'static str> {
        let mut segments: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if segments.len() < 2 {
            return None;
        }
        if segments[0] == "Self" {
            segments.splice(..1, self.this.iter().cloned());
        }
        let targets = self.source.resolve(self.path, &segments);
        ENUMS.into_iter().find_map(|(name, folder)| {
            let is_it = |target: &Target| matches!(target, Target::Item { file, name: found } if found == name && file.starts_with(folder));
            targets.iter().any(is_it).then_some(name)
        })
    }

    /// The places of a pattern that name a variant of an enum of ours.
    fn places(&self, pattern: &Pat, to: &Place, places: &mut Vec<Place>) {
        if self.variant(pattern).is_some() {
            places.push(to.clone());
        } else if let Pat::Or(or) = pattern {
            or.cases.iter().for_each(|case| self.places(case, to, places));
        } else if let Pat::Guard(conditional) = pattern {
            self.places(&conditional.pat, to, places);
        } else {
            for (field, inner) in fields(pattern) {
                self.places(inner, &[&to[..], &[field]].concat(), places);
            }
        }
    }

    /// The enum of ours that the pattern names a variant of.
    fn variant(&self, pattern: &Pat) -> Option<&'static str> {
        match plain(pattern) {
            Pat::Path(path) => self.enum_of(&path.path),
            Pat::Struct(pattern) => self.enum_of(&pattern.path),
            Pat::TupleStruct(pattern) => self.enum_of(&pattern.path),
            _ => None,
        }
    }

    fn has_wildcard(&self, arms: &[Arm]) -> bool {
        let mut places = Vec::new();
        for arm in arms {
            self.places(&arm.pat, &Place::new(), &mut places);
        }
        arms.iter()
            .any(|arm| places.iter().any(|place| takes_all(&arm.pat, place)))
    }

    /// Whether the pattern names an algorithm, and so passes over all others.
    fn names_an_algorithm(&self, pattern: &Pat) -> bool {
        let is_algorithm = |pattern: &Pat| {
            let name = self
                .variant(pattern)
                .filter(|_| matches!(plain(pattern), Pat::TupleStruct(_)));
            name.is_some_and(|name| ALGORITHMS.contains(&name))
        };
        match pattern {
            Pat::Or(or) => or.cases.iter().any(|case| self.names_an_algorithm(case)),
            _ => is_algorithm(pattern) || fields(pattern).iter().any(|(_, inner)| self.names_an_algorithm(inner)),
        }
    }

    /// The code of a macro, once what it is called with is called like its parameters.
    fn visit_definition(&mut self, rules: TokenStream) {
        for rule in rules {
            if let TokenTree::Group(body) = rule {
                let code = without_dollars(body.stream());
                match Block::parse_within.parse2(code.clone()) {
                    Ok(statements) => statements.iter().for_each(|statement| self.visit_stmt(statement)),
                    Err(_) => {
                        if let Ok(file) = syn::parse2::<syn::File>(code) {
                            self.visit_file(&file);
                        }
                    }
                }
            }
        }
    }
}

impl<'ast> Visit<'ast> for Matches<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !for_tests(super::source::attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        self.this.clear();
        if let Type::Path(this) = &*item.self_ty {
            let segments = this.path.segments.iter();
            self.this.extend(segments.map(|segment| segment.ident.to_string()));
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        self.function = function.sig.ident.to_string();
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        self.function = function.sig.ident.to_string();
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast TraitItemFn) {
        self.function = function.sig.ident.to_string();
        visit::visit_trait_item_fn(self, function);
    }

    fn visit_item_macro(&mut self, item: &'ast ItemMacro) {
        if let Some(name) = &item.ident {
            self.function = format!("{name}!");
            self.visit_definition(item.mac.tokens.clone());
        }
        visit::visit_item_macro(self, item);
    }

    fn visit_expr_match(&mut self, expression: &'ast ExprMatch) {
        if self.has_wildcard(&expression.arms) {
            self.report();
        }
        visit::visit_expr_match(self, expression);
    }

    fn visit_expr_let(&mut self, expression: &'ast ExprLet) {
        if self.names_an_algorithm(&expression.pat) {
            self.report();
        }
        visit::visit_expr_let(self, expression);
    }

    fn visit_local(&mut self, local: &'ast Local) {
        if self.names_an_algorithm(&local.pat) {
            self.report();
        }
        visit::visit_local(self, local);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        let pattern = |input: ParseStream<'_>| {
            input.parse::<syn::Expr>()?;
            input.parse::<syn::Token![,]>()?;
            let pattern = Pat::parse_multi_with_leading_vert(input)?;
            input.parse::<TokenStream>()?;
            Ok(pattern)
        };
        if call.path.is_ident("matches")
            && let Ok(pattern) = pattern.parse2(call.tokens.clone())
            && self.names_an_algorithm(&pattern)
        {
            self.report();
        }
    }
}

/// The pattern without references and parentheses.
fn plain(pattern: &Pat) -> &Pat {
    match pattern {
        Pat::Ident(named) => named.subpat.as_ref().map_or(pattern, |(_, inner)| plain(inner)),
        Pat::Paren(paren) => plain(&paren.pat),
        Pat::Reference(reference) => plain(&reference.pat),
        _ => pattern,
    }
}

/// The patterns of fields.
fn fields(pattern: &Pat) -> Vec<((String, String), &Pat)> {
    let name = |path: &syn::Path| {
        path.segments
            .last()
            .map(|segment| segment.ident.to_string())
            .unwrap_or_default()
    };
    match plain(pattern) {
        Pat::Tuple(tuple) => {
            let elements = tuple.elems.iter().enumerate();
            elements
                .map(|(index, inner)| ((String::new(), index.to_string()), inner))
                .collect()
        }
        Pat::TupleStruct(tuple) => {
            let elements = tuple.elems.iter().enumerate();
            elements
                .map(|(index, inner)| ((name(&tuple.path), index.to_string()), inner))
                .collect()
        }
        Pat::Struct(pattern) => {
            let fields = pattern.fields.iter();
            fields
                .map(|field| match &field.member {
                    syn::Member::Named(member) => ((name(&pattern.path), member.to_string()), &*field.pat),
                    syn::Member::Unnamed(index) => ((name(&pattern.path), index.index.to_string()), &*field.pat),
                })
                .collect()
        }
        _ => Vec::new(),
    }
}

/// Whether the pattern takes anything at this place, without a condition.
fn takes_all(pattern: &Pat, place: &[(String, String)]) -> bool {
    match plain(pattern) {
        Pat::Wild(_) => true,
        // A name in capitals is a constant.
        Pat::Ident(binding) => binding.ident.to_string().starts_with(|char: char| char.is_lowercase()),
        Pat::Or(or) => or.cases.iter().any(|case| takes_all(case, place)),
        pattern => place.split_first().is_some_and(|(first, rest)| {
            let mut fields = fields(pattern).into_iter();
            fields.any(|(field, inner)| field == *first && takes_all(inner, rest))
        }),
    }
}

/// `$name` as `name`.
fn without_dollars(tokens: TokenStream) -> TokenStream {
    let kept = tokens
        .into_iter()
        .filter(|token| !matches!(token, TokenTree::Punct(punct) if punct.as_char() == '$'));
    kept.map(|token| match token {
        TokenTree::Group(group) => Group::new(group.delimiter(), without_dollars(group.stream())).into(),
        token => token,
    })
    .collect()
}

#[test]
fn a_match_over_algorithms_or_operations_has_no_wildcard() {
    let found = wildcards(&Source::read("src"));
    let is_listed = |place: &str| KNOWN.contains(&place) || DELIBERATE.iter().any(|(meant, _)| *meant == place);
    let new: Vec<_> = found
        .iter()
        .map(String::as_str)
        .filter(|place| !is_listed(place))
        .collect();
    assert!(
        new.is_empty(),
        "name all variants, or list it with the reason:\n{}",
        new.join("\n")
    );
    let listed = DELIBERATE.iter().map(|(place, _)| *place).chain(KNOWN.iter().copied());
    assert_all_needed(listed, |place| found.iter().any(|found| found == place));
}

#[test]
fn a_wildcard_is_found_where_a_new_variant_would_be_taken() {
    let wild = [
        "match limit { Limit::Log(_) => 1, _ => 2 }",
        "match limit { &Limit::Log(ref x) | Limit::None => 1, other => 2 }",
        "match (limit, 1) { (Limit::Log(_), 1) => 1, (_, n) => 2, (Limit::None, 2) => 3 }",
        "match Some(limit) { Some(Limit::Log(_)) => 1, Some(_) => 2, None => 3 }",
        "match x { Wrapper { limit: Limit::Log(_), .. } => 1, Wrapper { limit, .. } => 2 }",
        "match x { crate::limit::Limit::None => 1, (_) => 2 }",
        "match operation { crate::store::Operation::Check { .. } => 1, _ => 2 }",
        "matches!(limit, Limit::Log(_) if true)",
        "if let Some(Limit::Log(log)) = limit {}",
        "let Limit::Log(log) = limit else { return };",
    ];
    let exact = [
        "match limit { Limit::Log(_) => 1, Limit::None => 2 }",
        "match limit { Limit::Log(1) => 1, Limit::Log(_) => 2, Limit::None => 3 }",
        "match limit { Limit::Log(_) => 1, _ if false => 3, Limit::None => 2 }",
        "match (limit, 1) { (Limit::Log(_), _) => 1, (Limit::None, other) => 2 }",
        "match 1 { 2 => Limit::None, _ => Limit::Log(1) }",
        "match other { Other::Log(_) => 1, _ => 2 }",
        "matches!(limit, Limit::None)",
        "match 1 { 1 => match limit { Limit::Log(_) | Limit::None => 1 }, _ => 2 }",
    ];
    let found = |code: &str| {
        wildcards(&Source::of(&[
            (
                "lib.rs",
                &format!("mod limit; mod store; mod x; use limit::Limit; {code}"),
            ),
            (
                "limit/mod.rs",
                "pub enum Limit { Log(u8), None } impl Limit { fn f(self) { match self { Self::Log(_) => 1, Self::None => 2 } } }",
            ),
            ("store/mod.rs", "pub enum Operation { Check }"),
            (
                "x.rs",
                "#[cfg(test)] mod tests { fn f() { match l { crate::Limit::None => 1, _ => 2 } } }",
            ),
        ]))
    };
    for code in wild {
        assert_eq!(found(&format!("fn f() {{ {code} }}")), ["src/lib.rs f"], "{code}");
    }
    for code in exact {
        assert!(found(&format!("fn f() {{ {code} }}")).is_empty(), "{code}");
    }
    let in_self = "impl Limit { fn g(&self) { match self { Self::Log(_) => 1, _ => 2 } } }";
    assert_eq!(found(in_self), ["src/lib.rs g"]);
    let in_macro = "macro_rules! m { ($x:expr, $y:ident) => { match $x { Limit::Log($y) => $y, _ => 2 } } }";
    assert_eq!(found(in_macro), ["src/lib.rs m!"]);
}
