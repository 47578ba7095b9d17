import Foundation
import ShardmillDecode

/// What an app may bring in place of `Tokenizer`.
public protocol TextCodec: Sendable {
    func encode(_ text: String, addSpecialTokens: Bool) throws -> [Int]
    func decode(_ tokens: [Int], skipSpecialTokens: Bool) -> String
}

/// A tokenizer.json of Hugging Face's `tokenizers`: byte-level or SentencePiece-like BPE, or WordPiece.
///
/// A part that this version does not support is refused by its name, never ignored.
public final class Tokenizer: TextCodec, @unchecked Sendable {  // its one mutable member is a cache under a lock
    private enum Model {
        case bpe(BPE)
        case wordPiece(WordPiece)

        func encode(_ word: ArraySlice<UInt8>) -> [Int] {
            switch self {
            case .bpe(let bpe): return bpe.encode(word)
            case .wordPiece(let wordPiece): return wordPiece.encode(word)
            }
        }
    }

    private let model: Model
    private let normalizer: Normalizer?
    private let preTokenizer: PreTokenizer?
    private let decoder: Decoder?
    private let added: AddedTokens
    private let prefix: [Int]
    private let suffix: [Int]
    private let tokens: [Int: ArraySlice<UInt8>]
    private let ids: [Bytes: Int]
    private let lock = NSLock()
    private var cache: [Bytes: [Int]] = [:]
    /// Words whose tokens are remembered, and the longest of them in bytes.
    private static let (cached, longest) = (20_000, 64)

    /// Read a tokenizer.json.
    ///
    /// - Throws: `ShardmillError` of kind `tokenizer` if the file is damaged, or has a part that is not supported.
    public convenience init(_ file: URL) throws {
        guard let data = try? Data(contentsOf: file) else { throw ShardmillError(.tokenizer, "\(file.path) can't be read") }
        do {
            try self.init(data: data)
        } catch let error as ShardmillError {
            throw ShardmillError(error.kind, "\(file.path): \(error.message)")
        }
    }

    public init(data: Data) throws {
        let json = try JSON.parse([UInt8](data))
        guard let model = json["model"] else { throw ShardmillError(.tokenizer, "it has no model") }
        var ids = try Self.vocabulary(model)
        added = try AddedTokens(json["added_tokens"]?.items ?? [])
        for token in added.all { ids[Bytes(token.content)] = token.id }
        switch model["type"]?.text ?? (model["merges"] == nil ? "WordPiece" : "BPE") {
        case "BPE": self.model = .bpe(try BPE(model, vocabulary: ids))
        case "WordPiece": self.model = .wordPiece(try WordPiece(model, vocabulary: ids))
        case let type: throw ShardmillError(.tokenizer, "the model '\(type)' is not supported")
        }
        self.ids = ids
        tokens = Dictionary(ids.map { ($1, $0.bytes) }) { first, _ in first }
        func part<Value>(_ key: String, _ make: (JSON) throws -> Value) throws -> Value? {
            guard let value = json[key], !value.isNull else { return nil }
            return try make(value)
        }
        normalizer = try part("normalizer", Normalizer.init)
        preTokenizer = try part("pre_tokenizer", PreTokenizer.init)
        decoder = try part("decoder", Decoder.init)
        (prefix, suffix) = try part("post_processor") { try Self.template($0, ids) } ?? ([], [])
    }

    private static func vocabulary(_ model: JSON) throws -> [Bytes: Int] {
        guard case .object(let entries)? = model["vocab"] else { throw ShardmillError(.tokenizer, "the model has no vocab") }
        var found: [Bytes: Int] = [:]
        found.reserveCapacity(entries.count)
        for (token, id) in entries {
            guard let id = id.int, (0..<1 << 24).contains(id) else {
                throw ShardmillError(.tokenizer, "the token '\(string(token).prefix(40))' has no id")
            }
            found[Bytes(token)] = id
        }
        return found
    }

    /// Return the special tokens before and after a text.
    private static func template(_ json: JSON, _ ids: [Bytes: Int]) throws -> ([Int], [Int]) {
        switch json["type"]?.text ?? "" {
        case "ByteLevel": return ([], [])
        case "Sequence":
            return try (json["processors"]?.items ?? []).reduce(([], [])) { found, step in
                let (before, after) = try template(step, ids)
                return (before + found.0, found.1 + after)
            }
        case "BertProcessing", "RobertaProcessing":
            func id(_ key: String) throws -> Int {
                guard let id = json[key]?.items?.last?.int else { throw ShardmillError(.tokenizer, "the post-processor has no \(key)") }
                return id
            }
            return ([try id("cls")], [try id("sep")])
        case "TemplateProcessing":
            var (before, after, seen) = ([Int](), [Int](), false)
            for item in json["single"]?.items ?? [] {
                if item["Sequence"] != nil {
                    seen = true
                } else if let name = item["SpecialToken"]?["id"]?.text {
                    guard let listed = json["special_tokens"]?[name]?["ids"]?.items else {
                        throw ShardmillError(.tokenizer, "the post-processor does not list '\(name)'")
                    }
                    let numbers = listed.compactMap(\.int)
                    if seen { after += numbers } else { before += numbers }
                }
            }
            return (before, after)
        case let type: throw ShardmillError(.tokenizer, "the post-processor '\(type)' is not supported")
        }
    }

    /// Return the id of a token by its text; nil if the vocabulary lacks it.
    public func id(of token: String) -> Int? { ids[Bytes(token)] }

    /// Return a text's tokens, with those before and after it (beginning of text, for example) if asked for.
    public func encode(_ text: String, addSpecialTokens: Bool = true) -> [Int] {
        var found = addSpecialTokens ? prefix : []
        var first = true
        for piece in added.split(Array(text.utf8)[...], normalized: false) {
            if let id = piece.id {
                found.append(id)
            } else {
                let text = normalizer?.apply(piece.bytes) ?? piece.bytes
                for piece in added.split(text, normalized: true) {
                    if let id = piece.id {
                        found.append(id)
                    } else {
                        let words = preTokenizer?.apply([piece.bytes], first: first) ?? [piece.bytes]
                        for word in words { found += encode(word) }
                    }
                    first = false
                }
            }
            first = false
        }
        return addSpecialTokens ? found + suffix : found
    }

    private func encode(_ word: ArraySlice<UInt8>) -> [Int] {
        if word.isEmpty { return [] }
        if word.count > Self.longest { return model.encode(word) }
        if let known = lock.withLock({ cache[Bytes(word)] }) { return known }
        let found = model.encode(word)
        lock.withLock {
            if cache.count >= Self.cached { cache.removeAll(keepingCapacity: true) }
            cache[Bytes(Array(word)[...])] = found
        }
        return found
    }

    /// Return the text of tokens. Bytes that are no character become U+FFFD; unknown ids are left out.
    public func decode(_ ids: [Int], skipSpecialTokens: Bool = true) -> String {
        let known = ids.filter { !(skipSpecialTokens && added.special.contains($0)) }.compactMap { tokens[$0] }
        guard let decoder else { return string(Array(known.joined(separator: [0x20]))[...]) }
        return string(Array(decoder.apply(known).joined())[...])
    }
}

/// Tokens that are found in the text before it is divided into words.
struct AddedTokens {
    struct Token {
        let id: Int
        let content: ArraySlice<UInt8>
        let special, normalized, lstrip, rstrip, singleWord: Bool
    }

    struct Piece {
        let bytes: ArraySlice<UInt8>
        let id: Int?
    }

    let all: [Token]
    let special: Set<Int>
    /// Tokens by "normalized" and first byte, the longest first.
    private let byFirst: [Bool: [UInt8: [Token]]]

    init(_ items: [JSON]) throws {
        all = try items.map { item in
            guard let id = item["id"]?.int, let content = item["content"]?.bytes, !content.isEmpty else {
                throw ShardmillError(.tokenizer, "an added token has no id or no content")
            }
            func flag(_ key: String) -> Bool { item[key]?.bool ?? false }
            return Token(
                id: id, content: content, special: flag("special"), normalized: flag("normalized"), lstrip: flag("lstrip"),
                rstrip: flag("rstrip"), singleWord: flag("single_word"))
        }
        special = Set(all.filter(\.special).map(\.id))
        byFirst = Dictionary(grouping: all, by: \.normalized).mapValues { tokens in
            Dictionary(grouping: tokens) { $0.content.first! }.mapValues { $0.sorted { $0.content.count > $1.content.count } }
        }
    }

    /// Divide a text into added tokens and what lies between them.
    func split(_ text: ArraySlice<UInt8>, normalized: Bool) -> [Piece] {
        guard let table = byFirst[normalized] else { return text.isEmpty ? [] : [Piece(bytes: text, id: nil)] }
        var found: [Piece] = []
        var last = text.startIndex
        var at = text.startIndex
        while at < text.endIndex {
            guard let token = table[text[at]]?.first(where: { text[at...].starts(with: $0.content) }) else {
                at += 1
                continue
            }
            var (start, end) = (at, at + token.content.count)
            if token.singleWord, isWord(scalarBefore(text, start)) || isWord(scalarAfter(text, end)) {
                at = end
                continue
            }
            if token.lstrip { while start > last, let scalar = scalarBefore(text[last...], start), isSpace(scalar) { start -= UTF8.width(scalar) } }
            if token.rstrip { while let scalar = scalarAfter(text, end), isSpace(scalar) { end += UTF8.width(scalar) } }
            if start > last { found.append(Piece(bytes: text[last..<start], id: nil)) }
            found.append(Piece(bytes: text[start..<end], id: token.id))
            last = end
            at = end
        }
        if last < text.endIndex { found.append(Piece(bytes: text[last...], id: nil)) }
        return found
    }
}

private func scalarBefore(_ text: ArraySlice<UInt8>, _ end: Int) -> Unicode.Scalar? {
    string(text[..<end].suffix(4)).unicodeScalars.last
}

private func scalarAfter(_ text: ArraySlice<UInt8>, _ start: Int) -> Unicode.Scalar? {
    string(text[start...].prefix(4)).unicodeScalars.first
}

private func isWord(_ scalar: Unicode.Scalar?) -> Bool {
    guard let scalar else { return false }
    return scalar == "_" || scalar.properties.isAlphabetic || scalar.properties.numericType != nil
        || scalar.properties.generalCategory == .nonspacingMark
}
