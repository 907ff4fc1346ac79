//! What a source file imports from its own crate, read as a stream of tokens: enough to find paths, and no parser.
//!
//! Tests are left out: what stands behind `#[cfg(test)]`, with the files that such a `mod` names.

use std::collections::{BTreeMap, BTreeSet};

/// A token and the line that it stands on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    text: String,
    line: usize,
}

/// A file without comments, strings and tests.
pub(super) struct Source {
    tokens: Vec<Token>,
}

impl Source {
    pub(super) fn read(text: &str) -> Self {
        let (all, mut tokens, mut index) = (tokens_of(text), Vec::new(), 0);
        while index < all.len() {
            if starts_with(&all[index..], &["#", "[", "cfg", "(", "test", ")", "]"]) {
                index = end_of_item(&all, index + 7);
            } else {
                tokens.push(all[index].clone());
                index += 1;
            }
        }
        Self { tokens }
    }

    /// The modules that this file declares in files of their own.
    pub(super) fn modules(&self) -> BTreeSet<String> {
        let named = self.tokens.windows(3).filter(|three| three[0].text == "mod" && three[2].text == ";");
        named.map(|three| three[1].text.clone()).collect()
    }

    /// Which module each name is from that a crate's root gives on under its own: `pub use module::Name`.
    pub(super) fn passed_on(&self, modules: &BTreeSet<String>) -> BTreeMap<String, String> {
        let mut names = BTreeMap::new();
        for (index, token) in self.tokens.iter().enumerate().filter(|(_, token)| token.text == "use") {
            let mut rest = &self.tokens[index + 1..];
            while starts_with(rest, &["crate", "::"]) || starts_with(rest, &["self", "::"]) {
                rest = &rest[2..];
            }
            let Some(module) = rest.first().map(|first| first.text.clone()) else { continue };
            if modules.contains(&module) && token.text == "use" {
                leaves(rest).into_iter().for_each(|name| drop(names.insert(name, module.clone())));
            }
        }
        names
    }

    /// The first names of all paths that begin at the crate's root, with their lines. `depth` is how deep below the root the
    /// file's own module lies: that many times `super` is the root, too.
    pub(super) fn paths(&self, depth: usize) -> Vec<(String, usize)> {
        let mut found = Vec::new();
        // Where inline modules end: each makes `super` mean one module less.
        let (mut braces, mut inline) = (0_usize, Vec::new());
        for (index, token) in self.tokens.iter().enumerate() {
            let rest = &self.tokens[index..];
            match token.text.as_str() {
                "mod" if rest.get(2).is_some_and(|next| next.text == "{") => inline.push(braces),
                "{" => braces += 1,
                "}" => {
                    braces = braces.saturating_sub(1);
                    inline.pop_if(|opened| *opened == braces);
                }
                _ => {}
            }
            let before = |back: usize| index.checked_sub(back).map_or("", |at| self.tokens[at].text.as_str());
            let is_visibility = before(1) == "in" && before(2) == "(";
            if is_visibility || before(1) == "::" {
                continue;
            }
            if starts_with(rest, &["crate", "::"]) {
                firsts(&rest[2..], &mut found);
            } else if token.text == "super" {
                let supers = rest.chunks(2).take_while(|pair| starts_with(pair, &["super", "::"])).count();
                if supers == depth + inline.len() {
                    firsts(&rest[2 * supers..], &mut found);
                }
            }
        }
        found
    }
}

/// The first name of a path, or of each path in braces.
fn firsts(rest: &[Token], found: &mut Vec<(String, usize)>) {
    let Some(first) = rest.first() else { return };
    if first.text != "{" {
        found.push((first.text.clone(), first.line));
        return;
    }
    let (mut depth, mut is_first) = (0_usize, false);
    for token in rest {
        match token.text.as_str() {
            "{" => {
                depth += 1;
                is_first = depth == 1;
            }
            "}" if depth == 1 => return,
            "}" => depth -= 1,
            "," => is_first = depth == 1,
            _ if is_first => {
                found.push((token.text.clone(), token.line));
                is_first = false;
            }
            _ => {}
        }
    }
}

/// The names that a `use` brings, up to its end: what stands last in each path, or behind `as`.
fn leaves(rest: &[Token]) -> Vec<String> {
    let mut names = Vec::new();
    let mut last = None;
    for token in rest {
        match token.text.as_str() {
            "," | "}" | ";" => {
                names.extend(last.take());
                if token.text == ";" {
                    break;
                }
            }
            "::" | "{" => last = None,
            "as" | "self" | "*" => {}
            name => last = Some(name.to_owned()),
        }
    }
    names
}

fn starts_with(tokens: &[Token], words: &[&str]) -> bool {
    tokens.len() >= words.len() && tokens.iter().zip(words).all(|(token, word)| token.text == *word)
}

/// Where the item that begins at `from` ends: behind its `;`, or behind its braces.
fn end_of_item(tokens: &[Token], from: usize) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(from) {
        match token.text.as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => {
                depth = depth.saturating_sub(1);
                if depth == 0 && token.text == "}" {
                    return index + 1;
                }
            }
            ";" if depth == 0 => return index + 1,
            _ => {}
        }
    }
    tokens.len()
}

fn tokens_of(text: &str) -> Vec<Token> {
    let characters: Vec<char> = text.chars().collect();
    let (mut tokens, mut at, mut line) = (Vec::new(), 0, 1);
    while let Some(&character) = characters.get(at) {
        let end = match character {
            '/' if characters.get(at + 1) == Some(&'/') => end_of_line(&characters, at),
            '/' if characters.get(at + 1) == Some(&'*') => end_of_comment(&characters, at),
            '"' => end_of_string(&characters, at),
            '\'' => end_of_quote(&characters, at),
            'r' | 'b' | 'c' if raw_string(&characters, at).is_some() => {
                raw_string(&characters, at).unwrap_or(characters.len())
            }
            _ if character.is_alphanumeric() || character == '_' => {
                let word = characters[at..].iter().take_while(|next| next.is_alphanumeric() || **next == '_').count();
                tokens.push(Token { text: characters[at..at + word].iter().collect(), line });
                at + word
            }
            ':' if characters.get(at + 1) == Some(&':') => {
                tokens.push(Token { text: "::".to_owned(), line });
                at + 2
            }
            _ if character.is_whitespace() => at + 1,
            _ => {
                tokens.push(Token { text: character.to_string(), line });
                at + 1
            }
        };
        line += characters[at..end.min(characters.len())].iter().filter(|passed| **passed == '\n').count();
        at = end;
    }
    tokens
}

fn end_of_line(characters: &[char], from: usize) -> usize {
    from + characters[from..].iter().take_while(|character| **character != '\n').count()
}

/// Comments may hold comments.
fn end_of_comment(characters: &[char], from: usize) -> usize {
    let (mut depth, mut at) = (0_usize, from);
    while at + 1 < characters.len() {
        match (characters[at], characters[at + 1]) {
            ('/', '*') => (depth, at) = (depth + 1, at + 2),
            ('*', '/') => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    characters.len()
}

fn end_of_string(characters: &[char], from: usize) -> usize {
    let mut at = from + 1;
    while let Some(character) = characters.get(at) {
        match character {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    characters.len()
}

/// A character, or a lifetime, of which only the quote is passed.
fn end_of_quote(characters: &[char], from: usize) -> usize {
    match (characters.get(from + 1), characters.get(from + 2)) {
        (Some('\\'), _) => {
            let rest = characters.iter().enumerate().skip(from + 3);
            rest.into_iter().find(|(_, character)| **character == '\'').map_or(characters.len(), |(at, _)| at + 1)
        }
        (Some(_), Some('\'')) => from + 3,
        _ => from + 1,
    }
}

/// The end of a string such as `r#"..."#` or `b"..."`, if one begins here.
fn raw_string(characters: &[char], from: usize) -> Option<usize> {
    if from.checked_sub(1).is_some_and(|before| characters[before].is_alphanumeric() || characters[before] == '_') {
        return None;
    }
    let prefix = characters[from..].iter().take_while(|character| "rbc".contains(**character)).count();
    let is_raw = characters[from..from + prefix].contains(&'r');
    let hashes = characters[from + prefix..].iter().take_while(|character| **character == '#').count();
    let quote = from + prefix + hashes;
    if prefix > 2 || characters.get(quote) != Some(&'"') || (!is_raw && hashes > 0) {
        return None;
    }
    if !is_raw {
        return Some(end_of_string(characters, quote));
    }
    let closes = |at: &usize| {
        characters[*at] == '"' && characters[at + 1..].iter().take_while(|next| **next == '#').count() >= hashes
    };
    Some((quote + 1..characters.len()).find(closes).map_or(characters.len(), |at| at + 1 + hashes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(text: &str, depth: usize) -> Vec<String> {
        Source::read(text).paths(depth).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn paths_to_the_root_are_found_wherever_they_stand() {
        let text = "use crate::a::B;\nuse crate::{b::{C, d}, c::E, f};\nfn x() -> crate::g::H { crate::h::i() }\n\
                    pub(in crate::j) fn y() {}\nuse other::crate_like::K;";
        assert_eq!(paths(text, 1), ["a", "b", "c", "f", "g", "h"]);
    }

    #[test]
    fn super_is_the_root_only_from_its_own_depth() {
        let text = "use super::a::B;\nuse super::super::c::D;\nmod inner { use super::super::e; use super::f; }\nuse super::g;";
        assert_eq!(paths(text, 1), ["a", "e", "g"]);
        assert_eq!(paths(text, 2), ["c"]);
    }

    #[test]
    fn comments_strings_and_tests_import_nothing() {
        let text = "// use crate::a;\n/* /* */ crate::b::c */\nconst X: &str = \"crate::d\"; const Y: &str = r#\"\"crate::e\"#;\n\
                    fn f<'a>(x: &'a str) -> char { '\"' }\n#[cfg(test)]\nmod tests { use crate::g; }\n#[cfg(test)]\nmod h;\n\
                    use crate::i;";
        assert_eq!(Source::read(text).paths(1), [("i".to_owned(), 9)]);
        assert!(Source::read(text).modules().is_empty());
    }

    #[test]
    fn the_names_that_a_root_gives_on_are_known_by_their_modules() {
        let text = "mod a;\npub mod b;\npub use a::{C, d::{E as F, g}};\npub use b::H;\npub use elsewhere::I;";
        let source = Source::read(text);
        let names = source.passed_on(&source.modules());
        let of = |name: &str| names.get(name).map(String::as_str);
        assert_eq!((of("C"), of("F"), of("g"), of("H")), (Some("a"), Some("a"), Some("a"), Some("b")));
        assert_eq!((of("E"), of("I"), of("d")), (None, None, None));
    }
}
