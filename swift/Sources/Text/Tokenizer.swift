import Foundation
import ShardmillDecode

/// What an app may bring in place of `Tokenizer`.
public protocol TextCodec: Sendable {
    /// Return a text's tokens, with those before and after it if asked for.
    func encode(_ text: String, addSpecialTokens: Bool) throws -> [Int]
    /// Return the text of tokens.
    func decode(_ tokens: [Int], skipSpecialTokens: Bool) -> String
}

/// A tokenizer.json of Hugging Face's `tokenizers`: byte-level or SentencePiece-like BPE, or WordPiece.
///
/// A part that this version does not support is refused by its name, never ignored.
package final class Tokenizer: TextCodec, @unchecked Sendable {  // its one mutable member is a cache under a lock
    enum Model {
        case bpe(BPE)
        case wordPiece(WordPiece)
    }

    let model: Model
    let normalizer: Normalizer?
    let preTokenizer: PreTokenizer?
    private let scanner: Scanner?
    private let decoder: Decoder?
    let added: AddedTokens
    let prefix: [Int]
    let suffix: [Int]
    /// Whether the places of tokens leave out the spaces at their ends.
    let trimsOffsets: Bool
    let vocabulary: Vocabulary
    private let lock = NSLock()
    private var cache: WordCache? = WordCache()  // nil while a thread uses it; another then makes its own

    /// Read a tokenizer.json.
    ///
    /// - Throws: `ShardmillError` of kind `tokenizer` if the file is damaged, or has a part that is not supported.
    package convenience init(_ file: URL) throws {
        guard let data = try? Data(contentsOf: file) else {
            throw ShardmillError(.tokenizer, "\(file.path) can't be read")
        }
        do {
            try self.init(data: data)
        } catch let error as ShardmillError {
            throw ShardmillError(error.kind, "\(file.path): \(error.message)")
        }
    }

    /// Read the contents of a tokenizer.json.
    ///
    /// - Throws: `ShardmillError` of kind `tokenizer`, as `init(_:)`.
    package init(data: Data) throws {
        let json = try JSON.parse([UInt8](data))
        guard let model = json["model"] else { throw ShardmillError(.tokenizer, "it has no model") }
        if let kind = model["type"]?.text, !["BPE", "WordPiece"].contains(kind) {
            throw ShardmillError(.tokenizer, "the model '\(kind.prefix(40))' is not supported")
        }
        guard case .vocabulary(let listed)? = model["vocab"]?.node else {
            throw ShardmillError(.tokenizer, "the model has no vocab")
        }
        func part<Value>(_ key: String, _ make: (JSON) throws -> Value) throws -> Value? {
            guard let value = json[key], !value.isNull else { return nil }
            return try make(value)
        }
        normalizer = try part("normalizer", Normalizer.init)
        added = try AddedTokens(
            part("added_tokens") { items in
                guard let items = items.items else { throw ShardmillError(.tokenizer, "added_tokens are no list") }
                return items
            } ?? [], normalizer: normalizer)
        var vocabulary = Vocabulary(listed, json.blob)
        for token in added.all { vocabulary.add(token.content, id: token.id) }
        self.vocabulary = vocabulary
        let steps = try part("pre_tokenizer", PreTokenizer.init)
        let type = model.type.isEmpty ? (model["merges"] == nil ? "WordPiece" : "BPE") : model.type
        let bytes = type == "BPE" ? steps?.withoutLetters : nil
        preTokenizer = bytes ?? steps
        scanner = preTokenizer?.scanner
        switch type {
        case "BPE": self.model = .bpe(try BPE(model, vocabulary: vocabulary, ofBytes: bytes != nil))
        default: self.model = .wordPiece(try WordPiece(model, vocabulary: vocabulary))
        }
        decoder = try part("decoder", Decoder.init)
        trimsOffsets = try part("post_processor", Self.trimsOffsets) ?? false
        (prefix, suffix) = try part("post_processor") { try Self.template($0, vocabulary) } ?? ([], [])
    }

    private static func trimsOffsets(_ json: JSON) throws -> Bool {
        switch json.type {
        case "ByteLevel", "RobertaProcessing": return try json.flag("trim_offsets") ?? true
        case "Sequence": return try json.items("processors").contains { try trimsOffsets($0) }
        default: return false
        }
    }

    /// Return the special tokens before and after a text.
    private static func template(_ json: JSON, _ ids: Vocabulary) throws -> ([Int], [Int]) {
        switch json.type {
        case "ByteLevel": return ([], [])
        case "Sequence":
            return try json.items("processors").reduce(([], [])) { found, step in
                let (before, after) = try template(step, ids)
                return (before + found.0, found.1 + after)
            }
        case "BertProcessing", "RobertaProcessing":
            func id(_ key: String) throws -> Int {
                guard let id = json[key]?.items?.last?.int else {
                    throw ShardmillError(.tokenizer, "the post-processor has no \(key)")
                }
                return id
            }
            return ([try id("cls")], [try id("sep")])
        case "TemplateProcessing":
            var (before, after, seen) = ([Int](), [Int](), false)
            for item in try json.items("single") {
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
    package func id(of token: String) -> Int? { vocabulary.id(token.utf8) }

    /// Return a text's tokens, with those before and after it (beginning of text, for example) if asked for.
    ///
    /// - Throws: `ShardmillError` of kind `tokenizer` if the file's regular expression takes too many steps for a text.
    package func encode(_ text: String, addSpecialTokens: Bool = true) throws -> [Int] {
        let cache =
            lock.withLock { () -> WordCache? in
                defer { self.cache = nil }
                return self.cache
            } ?? WordCache()
        defer { lock.withLock { self.cache = cache } }
        var found = addSpecialTokens ? prefix : []
        var first = true
        for piece in added.split(Array(text.utf8)[...], normalized: false) {
            if let id = piece.id {
                found.append(id)
            } else {
                let text = try normalizer?.apply(piece.bytes) ?? piece.bytes
                for piece in added.split(text, normalized: true) {
                    if let id = piece.id {
                        found.append(id)
                    } else {
                        try encode(piece.bytes, first: first, cache, into: &found)
                    }
                    first = false
                }
            }
            first = false
        }
        return addSpecialTokens ? found + suffix : found
    }

    /// Append the tokens of a piece of the text.
    private func encode(_ piece: ArraySlice<UInt8>, first: Bool, _ cache: WordCache, into found: inout [Int]) throws {
        func append(_ word: UnsafeBufferPointer<UInt8>) {
            if word.isEmpty { return }
            switch model {
            case .bpe(let bpe): bpe.encode(word, cache, into: &found)
            case .wordPiece(let wordPiece): cache.append(word, to: &found) { wordPiece.encode(word, into: &$0) }
            }
        }
        if let scanner {
            piece.withUnsafeBufferPointer { bytes in
                var at = 0
                while at < bytes.count {
                    let end = scanner.end(bytes, at)
                    append(UnsafeBufferPointer(rebasing: bytes[at..<end]))
                    at = end
                }
            }
        } else {
            let words = try preTokenizer?.apply([piece], first: first) ?? [piece]
            for word in words { word.withUnsafeBufferPointer(append) }
        }
    }

    /// Return the text of tokens. Bytes that are no character become U+FFFD; unknown ids are left out.
    package func decode(_ ids: [Int], skipSpecialTokens: Bool = true) -> String {
        var known: [ArraySlice<UInt8>] = []
        known.reserveCapacity(ids.count)
        for id in ids where !(skipSpecialTokens && added.special.contains(id)) {
            if let token = added.normal[id] ?? vocabulary.token(id) { known.append(token) }
        }
        guard let decoder else { return string(Array(known.joined(separator: [0x20]))[...]) }
        return string(joined(decoder.apply(known)))
    }
}
