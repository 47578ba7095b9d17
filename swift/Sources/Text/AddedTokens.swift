import ShardmillDecode

/// Tokens that are found in the text before it is divided into words.
struct AddedTokens: Sendable {
    struct Token: Sendable {
        let id: Int
        let content: ArraySlice<UInt8>
        let special, normalized, lstrip, rstrip, singleWord: Bool
    }

    struct Piece {
        let bytes: ArraySlice<UInt8>
        let id: Int?
    }

    /// Tokens by their content, and the lengths of contents by their first byte, descending.
    private struct Table: Sendable {
        var tokens: [ArraySlice<UInt8>: Token] = [:]
        var lengths: [[Int]] = Array(repeating: [], count: 256)

        mutating func add(_ token: Token, as content: ArraySlice<UInt8>) {
            guard let first = content.first else { return }
            tokens[content] = token
            var all = Set(lengths[Int(first)])
            all.insert(content.count)
            lengths[Int(first)] = all.sorted(by: >)
        }
    }

    let all: [Token]
    let special: Set<Int>
    /// What normalized tokens are decoded to.
    private(set) var normal: [Int: ArraySlice<UInt8>] = [:]
    private var plain = Table()
    private var normalized = Table()

    /// - Parameters:
    ///   - items: the tokens as the file lists them.
    ///   - normalizer: what changes the text before normalized tokens are looked for; it changes these tokens as well.
    init(_ items: [JSON], normalizer: Normalizer?) throws {
        all = try items.map { item in
            let (number, text) = (item["id"]?.int, item["content"]?.bytes)
            guard let id = number, (0..<1 << 24).contains(id), let content = text, !content.isEmpty else {
                throw ShardmillError(.tokenizer, "an added token has no id or no content")
            }
            func flag(_ key: String) throws -> Bool { try item.flag(key) ?? false }
            return Token(
                id: id, content: content, special: try flag("special"), normalized: try flag("normalized"),
                lstrip: try flag("lstrip"), rstrip: try flag("rstrip"), singleWord: try flag("single_word"))
        }
        special = Set(all.filter(\.special).map(\.id))
        for token in all {
            if token.normalized {
                let content = try normalizer?.apply(token.content) ?? token.content
                normalized.add(token, as: content)
                normal[token.id] = content
            } else {
                plain.add(token, as: token.content)
            }
        }
    }

    /// Divide a text into added tokens and what lies between them.
    func split(_ text: ArraySlice<UInt8>, normalized wanted: Bool) -> [Piece] {
        let table = wanted ? normalized : plain
        if table.tokens.isEmpty { return text.isEmpty ? [] : [Piece(bytes: text, id: nil)] }
        var found: [Piece] = []
        var last = text.startIndex
        var at = text.startIndex
        while let (place, token, count) = Self.next(text, from: at, table) {
            var (start, end) = (place, place + count)
            at = end
            if token.singleWord, isWord(scalarBefore(text, start)) || isWord(scalarAfter(text, end)) { continue }
            while token.lstrip, start > last, let scalar = scalarBefore(text[last...], start), isSpace(scalar) {
                start -= UTF8.width(scalar)
            }
            while token.rstrip, let scalar = scalarAfter(text, end), isSpace(scalar) { end += UTF8.width(scalar) }
            if start > last { found.append(Piece(bytes: text[last..<start], id: nil)) }
            found.append(Piece(bytes: text[start..<end], id: token.id))
            last = end
            at = end
        }
        if last < text.endIndex { found.append(Piece(bytes: text[last...], id: nil)) }
        return found
    }

    /// Return the first token from a place on, of several there the longest, with its place and its length.
    private static func next(_ text: ArraySlice<UInt8>, from start: Int, _ table: Table) -> (Int, Token, Int)? {
        let base = text.startIndex
        return text.withUnsafeBufferPointer { bytes in
            for at in start - base..<bytes.count {
                for count in table.lengths[Int(bytes[at])] where at + count <= bytes.count {
                    if let token = table.tokens[text[base + at..<base + at + count]] {
                        return (base + at, token, count)
                    }
                }
            }
            return nil
        }
    }
}

private func scalarBefore(_ text: ArraySlice<UInt8>, _ end: Int) -> Unicode.Scalar? {
    string(text[..<end].suffix(4)).unicodeScalars.last
}

private func scalarAfter(_ text: ArraySlice<UInt8>, _ start: Int) -> Unicode.Scalar? {
    string(text[start...].prefix(4)).unicodeScalars.first
}

/// Return whether a scalar is one of \w, as Rust's regular expressions have it.
private func isWord(_ scalar: Unicode.Scalar?) -> Bool {
    guard let scalar else { return false }
    switch scalar.properties.generalCategory {
    case .nonspacingMark, .spacingMark, .enclosingMark, .decimalNumber, .connectorPunctuation: return true
    default: return scalar.properties.isAlphabetic || scalar.properties.isJoinControl
    }
}
