import ShardmillDecode

/// WordPiece: the longest known beginning of a word, again and again; a word with an unknown piece is unknown as a
/// whole.
struct WordPiece: Sendable {
    private let vocabulary: Vocabulary
    let prefix: [UInt8]
    private let unknown: Int
    private let longest: Int

    init(_ model: JSON, vocabulary: Vocabulary) throws {
        self.vocabulary = vocabulary
        prefix = Array(try model.optionalBytes("continuing_subword_prefix") ?? ArraySlice("##".utf8))
        longest = try model.count("max_input_chars_per_word") ?? 100
        guard let name = try model.optionalBytes("unk_token"), let id = vocabulary.id(name) else {
            throw ShardmillError(.tokenizer, "the vocabulary lacks unk_token")
        }
        unknown = id
    }

    /// Return whether a token stands for a word that has no others.
    func isUnknown(_ id: Int) -> Bool { id == unknown }

    /// Append the tokens of a word, given as UTF-8.
    func encode(_ word: UnsafeBufferPointer<UInt8>, into found: inout [Int]) {
        let starts = word.indices.filter { word[$0] & 0xC0 != 0x80 } + [word.endIndex]
        if starts.count - 1 > longest { return found.append(unknown) }
        let before = found.count
        var piece = prefix
        var at = 0
        while at < starts.count - 1 {
            var end = starts.count - 1
            var id: Int?
            let skipped = at > 0 ? 0 : prefix.count
            piece.removeSubrange(prefix.count...)
            piece += word[starts[at]...]
            while end > at {
                let count = prefix.count + starts[end] - starts[at]
                id = piece.withUnsafeBufferPointer { vocabulary.id(UnsafeBufferPointer(rebasing: $0[skipped..<count])) }
                if id != nil { break }
                end -= 1
            }
            guard let id else {
                found.removeSubrange(before...)
                return found.append(unknown)
            }
            found.append(id)
            at = end
        }
    }
}
