//! The modules of a crate, parsed, without what is compiled for tests only.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs, mem,
    path::Path,
};

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, Item, ItemMod, ItemUse, Meta, Token, UseTree, Visibility,
    parse::Parser,
    punctuated::Punctuated,
    visit::{self, Visit},
};

/// The path of a module below the root of the crate: `["store", "memory"]`.
pub(super) type ModulePath = Vec<String>;

/// A crate.
#[derive(Default)]
pub(super) struct Source {
    pub(super) modules: BTreeMap<ModulePath, Module>,
    /// The number of lines of each file, without modules that are compiled for tests only.
    pub(super) lines: BTreeMap<String, usize>,
    /// The file that defines a macro of `macro_rules!`.
    macros: HashMap<String, String>,
}

/// A module, in a file of its own or in the file of its parent.
pub(super) struct Module {
    pub(super) file: String,
    /// What it contains, without `#[cfg(test)]` modules.
    pub(super) items: Vec<Item>,
    names: HashMap<String, Vec<Name>>,
    globs: Vec<Vec<String>>,
}

/// What a name stands for in a module.
enum Name {
    Item,
    Module,
    Import(Vec<String>),
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Target {
    /// An item, by the file that defines it and its name.
    Item {
        file: String,
        name: String,
    },
    Module(ModulePath),
}

impl Source {
    /// The crate whose `lib.rs` is in this folder. Files are named relative to the folder of the package.
    pub(super) fn read(folder: &str) -> Self {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        Self::parse(folder, &|file| fs::read_to_string(package.join(file)).ok())
    }

    /// A crate of these files, which are named relative to `lib.rs`.
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        let find = |file: &str| {
            let mut files = files.iter();
            files
                .find(|(name, _)| file.strip_prefix("src/") == Some(name))
                .map(|(_, text)| (*text).to_owned())
        };
        Self::parse("src", &find)
    }

    fn parse(folder: &str, find: &dyn Fn(&str) -> Option<String>) -> Self {
        let root = format!("{folder}/lib.rs");
        let mut source = Self::default();
        let items = source.parse_file(&root, find);
        source.add(Vec::new(), root, folder, items, find);
        source
    }

    fn parse_file(&mut self, file: &str, find: &dyn Fn(&str) -> Option<String>) -> Vec<Item> {
        let text = find(file).unwrap_or_else(|| panic!("{file} is missing"));
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        let mut tests = TestLines(0);
        tests.visit_file(&parsed);
        self.lines.insert(file.to_owned(), text.lines().count() - tests.0);
        parsed.items
    }

    /// Adds a module and those below it. The files of its children are in `folder`.
    fn add(
        &mut self,
        path: ModulePath,
        file: String,
        folder: &str,
        items: Vec<Item>,
        find: &dyn Fn(&str) -> Option<String>,
    ) {
        let mut names = Names::default();
        let mut items: Vec<_> = items
            .into_iter()
            .flat_map(expand)
            .filter(|item| !is_for_tests(item))
            .collect();
        for item in &items {
            names.add(item);
        }
        names.imports_of_blocks(&items);
        for name in &names.macros {
            self.macros.insert(name.clone(), file.clone());
        }

        items.retain_mut(|item| {
            let Item::Mod(module) = item else { return true };
            let name = module.ident.to_string();
            let folder = format!("{folder}/{name}");
            let path = path.iter().cloned().chain([name]).collect();
            match module.content.take() {
                Some((_, items)) => self.add(path, file.clone(), &folder, items, find),
                None => {
                    let of_its_own = format!("{folder}.rs");
                    let file = find(&of_its_own).map_or(format!("{folder}/mod.rs"), |_| of_its_own);
                    let items = self.parse_file(&file, find);
                    self.add(path, file, &folder, items, find);
                }
            }
            false
        });
        let Names { names, globs, .. } = names;
        let module = Module {
            file,
            items,
            names,
            globs,
        };
        self.modules.insert(path, module);
    }

    /// What the path leads to, seen from this module; nothing if it leads to another crate.
    pub(super) fn resolve(&self, module: &[String], path: &[String]) -> HashSet<Target> {
        self.walk(module, path, &mut HashSet::new())
    }

    /// The file that defines this macro of `macro_rules!`, which may be used by its name alone.
    pub(super) fn macro_file(&self, name: &str) -> Option<&str> {
        self.macros.get(name).map(String::as_str)
    }

    fn walk(&self, module: &[String], path: &[String], seen: &mut HashSet<(ModulePath, String)>) -> HashSet<Target> {
        let Some((first, mut rest)) = path.split_first() else {
            return HashSet::new();
        };
        let mut targets = match first.as_str() {
            "crate" => HashSet::from([Target::Module(Vec::new())]),
            "self" => HashSet::from([Target::Module(module.to_vec())]),
            "super" => {
                let mut parents = module.len().saturating_sub(1);
                while let Some((_, others)) = rest.split_first().filter(|(next, _)| *next == "super") {
                    (parents, rest) = (parents.saturating_sub(1), others);
                }
                HashSet::from([Target::Module(module[..parents].to_vec())])
            }
            name => self.look_up(module, name, seen),
        };
        for segment in rest {
            targets = targets
                .into_iter()
                .flat_map(|target| match target {
                    // A variant or an associated function.
                    Target::Item { .. } => HashSet::from([target]),
                    Target::Module(path) => {
                        let found = self.look_up(&path, segment, seen);
                        if found.is_empty() {
                            self.made_by_a_macro(&path, segment)
                        } else {
                            found
                        }
                    }
                })
                .collect();
        }
        targets
    }

    fn look_up(&self, path: &[String], name: &str, seen: &mut HashSet<(ModulePath, String)>) -> HashSet<Target> {
        let mut targets = HashSet::new();
        let Some(module) = self.modules.get(path) else {
            return targets;
        };
        if !seen.insert((path.to_vec(), name.to_owned())) {
            return targets;
        }
        for found in module.names.get(name).into_iter().flatten() {
            match found {
                Name::Item => {
                    let (file, name) = (module.file.clone(), name.to_owned());
                    targets.insert(Target::Item { file, name });
                }
                Name::Module => {
                    targets.insert(Target::Module([path, &[name.to_owned()]].concat()));
                }
                Name::Import(import) => targets.extend(self.walk(path, import, seen)),
            }
        }
        if targets.is_empty() {
            for glob in &module.globs {
                for target in self.walk(path, glob, seen) {
                    if let Target::Module(path) = target {
                        targets.extend(self.look_up(&path, name, seen));
                    }
                }
            }
        }
        seen.remove(&(path.to_vec(), name.to_owned()));
        targets
    }

    /// An item that no parser finds is defined by a macro that its module calls.
    fn made_by_a_macro(&self, module: &[String], name: &str) -> HashSet<Target> {
        let module = self.modules.get(module);
        let calls_macros = module.filter(|module| {
            let mut items = module.items.iter();
            items.any(|item| matches!(item, Item::Macro(call) if call.ident.is_none()))
        });
        calls_macros
            .map(|module| Target::Item {
                file: module.file.clone(),
                name: name.to_owned(),
            })
            .into_iter()
            .collect()
    }
}

/// The items of a macro call whose arguments are items, such as `pin_project! { struct .. }`; else the item itself.
fn expand(item: Item) -> Vec<Item> {
    if let Item::Macro(call) = &item
        && call.ident.is_none()
        && let Ok(file) = syn::parse2::<syn::File>(call.mac.tokens.clone())
        && !file.items.is_empty()
    {
        return file.items;
    }
    vec![item]
}

fn is_for_tests(item: &Item) -> bool {
    for_tests(attributes(item))
}

pub(super) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Whether these attributes compile something for tests only.
pub(super) fn for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let is_cfg = attribute.path().is_ident("cfg");
        is_cfg
            && attribute
                .parse_args::<Meta>()
                .is_ok_and(|condition| needs_test(&condition))
    })
}

fn needs_test(condition: &Meta) -> bool {
    let Meta::List(list) = condition else {
        return condition.path().is_ident("test") || condition.path().is_ident("doctest");
    };
    let parser = Punctuated::<Meta, Token![,]>::parse_terminated;
    let conditions = parser.parse2(list.tokens.clone()).unwrap_or_default();
    if list.path.is_ident("all") {
        conditions.iter().any(needs_test)
    } else {
        list.path.is_ident("any") && conditions.iter().all(needs_test)
    }
}

/// The lines of modules that are compiled for tests only, attributes included.
struct TestLines(usize);

impl<'ast> Visit<'ast> for TestLines {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        match &module.content {
            Some((braces, _)) if for_tests(&module.attrs) => {
                let first = module.attrs[0].pound_token.span.start().line;
                self.0 += braces.span.close().end().line - first + 1;
            }
            _ => visit::visit_item_mod(self, module),
        }
    }
}

#[derive(Default)]
struct Names {
    names: HashMap<String, Vec<Name>>,
    globs: Vec<Vec<String>>,
    macros: Vec<String>,
}

impl Names {
    fn add(&mut self, item: &Item) {
        let ident = match item {
            Item::Const(item) => &item.ident,
            Item::Enum(item) => &item.ident,
            Item::Fn(item) => &item.sig.ident,
            Item::Macro(item) => match &item.ident {
                Some(name) => {
                    self.macros.push(name.to_string());
                    name
                }
                None => return,
            },
            Item::Mod(item) => return self.name(item.ident.to_string(), Name::Module),
            Item::Static(item) => &item.ident,
            Item::Struct(item) => &item.ident,
            Item::Trait(item) => &item.ident,
            Item::Type(item) => &item.ident,
            Item::Use(item) => return self.import(item),
            _ => return,
        };
        self.name(ident.to_string(), Name::Item);
    }

    fn name(&mut self, name: String, target: Name) {
        self.names.entry(name).or_default().push(target);
    }

    fn import(&mut self, item: &ItemUse) {
        // `use ::axum::..` is another crate, whatever modules are called.
        if item.leading_colon.is_none() {
            for (name, path) in leaves(&item.tree) {
                match name {
                    Some(name) => self.name(name, Name::Import(path)),
                    None => self.globs.push(path),
                }
            }
        }
    }

    /// `use` in the body of a function, as if it stood in the module.
    fn imports_of_blocks(&mut self, items: &[Item]) {
        struct Blocks<'a>(&'a mut Names);

        impl<'ast> Visit<'ast> for Blocks<'_> {
            fn visit_item_mod(&mut self, _: &'ast ItemMod) {}

            fn visit_item_use(&mut self, item: &'ast ItemUse) {
                self.0.import(item);
            }
        }

        for item in items {
            if !matches!(item, Item::Use(_)) {
                Blocks(self).visit_item(item);
            }
        }
    }
}

/// Whether others may import what this `use` imports.
pub(super) fn is_re_export(item: &ItemUse) -> bool {
    !matches!(item.vis, Visibility::Inherited)
}

/// The names that a `use` gives to paths; no name for `*`.
pub(super) fn leaves(tree: &UseTree) -> Vec<(Option<String>, Vec<String>)> {
    fn collect(tree: &UseTree, path: &[String], found: &mut Vec<(Option<String>, Vec<String>)>) {
        let with = |segment: String| [path, &[segment]].concat();
        match tree {
            UseTree::Path(inner) => collect(&inner.tree, &with(inner.ident.to_string()), found),
            UseTree::Group(group) => group.items.iter().for_each(|tree| collect(tree, path, found)),
            UseTree::Glob(_) => found.push((None, path.to_vec())),
            UseTree::Name(name) if name.ident == "self" => found.push((path.last().cloned(), path.to_vec())),
            UseTree::Name(name) => found.push((Some(name.ident.to_string()), with(name.ident.to_string()))),
            UseTree::Rename(rename) => {
                let path = match rename.ident.to_string() {
                    name if name == "self" => path.to_vec(),
                    name => with(name),
                };
                found.push((Some(rename.rename.to_string()), path));
            }
        }
    }

    let mut found = Vec::new();
    collect(tree, &[], &mut found);
    found
}

/// The paths in the arguments of a macro call, or in the definition of a macro.
pub(super) fn paths_in(tokens: TokenStream) -> Vec<Vec<String>> {
    let (mut paths, mut path) = (Vec::new(), Vec::new());
    let (mut colons, mut is_member) = (0, false);
    for token in tokens {
        // `::name` without a start is of another crate.
        let goes_on = colons == 2 && !path.is_empty();
        match &token {
            TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
            TokenTree::Ident(ident) if goes_on => {
                path.push(ident.to_string());
                colons = 0;
            }
            _ => {
                paths.push(mem::take(&mut path));
                if let TokenTree::Ident(ident) = &token
                    && colons < 2
                    && !is_member
                {
                    path.push(ident.to_string());
                }
                colons = 0;
            }
        }
        is_member = matches!(&token, TokenTree::Punct(punct) if punct.as_char() == '.');
        if let TokenTree::Group(group) = token {
            paths.extend(paths_in(group.stream()));
        }
    }
    paths.push(path);
    paths.retain(|path| !path.is_empty());
    paths
}
