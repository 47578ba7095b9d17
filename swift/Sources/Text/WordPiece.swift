import ShardmillDecode

/// WordPiece: the longest known beginning of a word, again and again; a word with an unknown piece is unknown as a whole.
struct WordPiece {
    private let ids: [Bytes: Int]
    private let prefix: ArraySlice<UInt8>
    private let unknown: Int
    private let longest: Int

    init(_ model: JSON, vocabulary: [Bytes: Int]) throws {
        ids = vocabulary
        prefix = model["continuing_subword_prefix"]?.bytes ?? ArraySlice("##".utf8)
        longest = model["max_input_chars_per_word"]?.int ?? 100
        guard let name = model["unk_token"]?.bytes, let id = vocabulary[Bytes(name)] else {
            throw ShardmillError(.tokenizer, "the vocabulary lacks unk_token")
        }
        unknown = id
    }

    /// Return the tokens of a word, given as UTF-8.
    func encode(_ word: ArraySlice<UInt8>) -> [Int] {
        let starts = word.indices.filter { word[$0] & 0xC0 != 0x80 } + [word.endIndex]
        if starts.count - 1 > longest { return [unknown] }
        var found: [Int] = []
        var at = 0
        while at < starts.count - 1 {
            var end = starts.count - 1
            var id: Int?
            while end > at {
                let piece = word[starts[at]..<starts[end]]
                id = ids[Bytes(at > 0 ? prefix + piece : piece)]
                if id != nil { break }
                end -= 1
            }
            guard let id else { return [unknown] }
            found.append(id)
            at = end
        }
        return found
    }
}
