import Foundation
import ShardmillDecode
import Testing

@testable import ShardmillText

private struct Made: Decodable {
    let name, file: String
    let texts, decoded: [String]
    let ids: [[Int]]
    let places: [[[Int]]]
}

/// Tokenizers that swift/scripts/made_tokenizers.py made, with what the Python package makes of texts.
private let made: [Made] = {
    let folder = URL(fileURLWithPath: #filePath).deletingLastPathComponent().deletingLastPathComponent()
    let data = try? Data(contentsOf: folder.appendingPathComponent("Vectors/tokenizers.json"))
    return (try? JSONDecoder().decode([Made].self, from: data ?? Data())) ?? []
}()

@Test("each kind of tokenizer gives the ids and the texts of the Python package")
func tokenizers() throws {
    #expect(made.count > 20)
    for one in made {
        let tokenizer = try Tokenizer(data: Data(one.file.utf8))
        for (text, (ids, decoded)) in zip(one.texts, zip(one.ids, one.decoded)) {
            for _ in 0..<2 {  // again from the cache
                #expect(try tokenizer.encode(text) == ids, "\(one.name): \(text.debugDescription)")
            }
            #expect(Array(tokenizer.decode(ids, skipSpecialTokens: false).utf8) == Array(decoded.utf8), "\(one.name)")
        }
    }
}

@Test("tokens lie where the Python package says, or the tokenizer is refused")
func places() throws {
    var known: Set<String> = []
    for one in made {
        let tokenizer = try Tokenizer(data: Data(one.file.utf8))
        guard (try? tokenizer.encodeWithOffsets("a")) != nil else { continue }
        known.insert(one.name)
        for (text, (ids, places)) in zip(one.texts, zip(one.ids, one.places)) {
            let found = try tokenizer.encodeWithOffsets(text)
            #expect(found.ids == ids, "\(one.name): \(text.debugDescription)")
            #expect(
                found.offsets.map { [$0.lowerBound, $0.upperBound] } == places, "\(one.name): \(text.debugDescription)")
        }
    }
    #expect(known.isSuperset(of: ["gpt2", "llama3", "qwen", "o200k", "bert", "cased"]), "\(known.sorted())")
}

@Test("scanners divide texts as the regular expressions do")
func scanners() throws {
    let patterns = Set(
        made.flatMap { one -> [String] in
            let steps = (try? JSON.parse(Array(one.file.utf8)))?["pre_tokenizer"]?["pretokenizers"]?.items ?? []
            return steps.compactMap { $0["pattern"]?["Regex"]?.text }
        } + [#"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"#])
    let known = patterns.filter { Scanner(pattern: $0) != nil }
    #expect(known.count == 5)
    let texts = made.first.map(\.texts) ?? []
    for pattern in known {
        let (scanner, regex) = (try Pattern(regex: pattern), try Pattern(regex: pattern, scans: false))
        for text in texts + [texts.joined(), texts.joined(separator: " "), texts.joined(separator: "\n ")] {
            let bytes = Array(text.utf8)[...]
            #expect(
                try scanner.split(bytes).map(\.range) == regex.split(bytes).map(\.range),
                "\(pattern): \(text.debugDescription)")
        }
    }
}

@Test("words that are too long for the cache and for short merges are merged alike")
func longWords() throws {
    let one = try #require(made.first { $0.name == "gpt2" })
    let tokenizer = try Tokenizer(data: Data(one.file.utf8))
    let word = String(repeating: "thestonemill", count: 50)
    #expect(tokenizer.decode(try tokenizer.encode(word)) == word)
    let twice = try tokenizer.encode(String(repeating: "the", count: 20)).count
    #expect(try tokenizer.encode(String(repeating: "the", count: 40)).count == 2 * twice)
}

@Test(
    "a damaged or unknown part is an error that names it",
    arguments: [
        ("\"ByteLevel\"", "\"Bytelevel\"", "Bytelevel"), ("\"BPE\"", "\"Unigram\"", "Unigram"),
        ("\"merges\"", "\"merge\"", "merges"),
        ("\"vocab\"", "\"vocal\"", "vocab"),
        ("\"add_prefix_space\": false", "\"add_prefix_space\": 3", "add_prefix_space"),
        ("\"dropout\": null", "\"dropout\": 0.5", "dropout"),
        ("\"ignore_merges\": false", "\"ignore_merges\": []", "ignore_merges"),
        ("\"<|end|>\": 0", "\"<|end|>\": 1e30", "<|end|>"),
        ("\"<|end|>\": 0", "\"<|end|>\": 99999999999999", "<|end|>"),
        ("\"normalizer\": null", "\"normalizer\": {\"type\": \"Precompiled\"}", "Precompiled"),
        ("\"normalizer\": null", "\"normalizer\": {\"type\": \"Sequence\"}", "normalizers"),
        ("\"normalizer\": null", "\"normalizer\": {\"type\": \"Prepend\", \"prepend\": 5}", "prepend"),
        ("\"special\": true", "\"special\": \"yes\"", "special"),
    ])
func unknownParts(from: String, to: String, named: String) throws {
    let one = try #require(made.first { $0.name == "gpt2" })
    let file = one.file.replacingOccurrences(of: from, with: to)
    #expect(file != one.file)
    do {
        _ = try Tokenizer(data: Data(file.utf8))
        Issue.record("the file is accepted")
    } catch let error as ShardmillError {
        #expect(error.kind == .tokenizer && error.message.contains(named), "\(error)")
    }
}

@Test("each part of a tokenizer that is not supported is refused by its name")
func refusedParts() throws {
    let one = try #require(made.first { $0.name == "gpt2" })
    let whole = try #require(try JSONSerialization.jsonObject(with: Data(one.file.utf8)) as? [String: Any])
    let single: [String: Any] = ["SpecialToken": ["id": "<s>", "type_id": 0]]
    let refused: [(key: String, changes: [String: Any], named: String)] = [
        ("model", ["type": "WordLevel"], "the model 'WordLevel'"),
        ("model", ["continuing_subword_prefix": "##"], "continuing_subword_prefix"),
        ("model", ["end_of_word_suffix": "</w>"], "end_of_word_suffix"),
        ("model", ["unk_token": "<none>"], "lacks unk_token"),
        ("normalizer", ["type": "Nmt"], "the normalizer 'Nmt'"),
        ("pre_tokenizer", ["type": "CharDelimiterSplit"], "the pre-tokenizer 'CharDelimiterSplit'"),
        ("pre_tokenizer", ["type": "Punctuation", "behavior": "Sideways"], "the behavior 'Sideways'"),
        ("pre_tokenizer", ["type": "Metaspace", "prepend_scheme": "twice"], "the prepend_scheme 'twice'"),
        ("pre_tokenizer", ["type": "Split", "pattern": ["Regex": "("]], "the pattern '('"),
        ("pre_tokenizer", ["type": "Split", "pattern": ["Glob": "*"]], "neither a text nor a regular expression"),
        ("decoder", ["type": "CTC"], "the decoder 'CTC'"),
        ("decoder", ["type": "Replace", "pattern": ["Regex": "a"], "content": ""], "a decoder that replaces"),
        ("post_processor", ["type": "Rerank"], "the post-processor 'Rerank'"),
        ("post_processor", ["type": "BertProcessing"], "the post-processor has no cls"),
        ("post_processor", ["type": "TemplateProcessing", "single": [single]], "does not list '<s>'"),
    ]
    for (key, changes, named) in refused {
        let before = key == "model" ? whole[key] as? [String: Any] ?? [:] : [:]
        let file = whole.merging([key: before.merging(changes) { $1 }]) { $1 }
        let data = try JSONSerialization.data(withJSONObject: file)
        #expect("\(key): \(named)") { try Tokenizer(data: data) } throws: {
            let error = $0 as? ShardmillError
            return error?.kind == .tokenizer && error?.message.contains(named) == true
        }
    }
}

@Test("a tokenizer that hides where tokens lie is refused by the part that does, though it encodes")
func hiddenPlaces() throws {
    for (name, named) in [("gemma", "the normalizer"), ("metaspace", "the pre-tokenizer")] {
        let one = try #require(made.first { $0.name == name })
        let tokenizer = try Tokenizer(data: Data(one.file.utf8))
        #expect(try !tokenizer.encode("a b").isEmpty)
        #expect("\(name)") { try tokenizer.encodeWithOffsets("a b") } throws: {
            ($0 as? ShardmillError)?.message.contains(named) == true
        }
    }
}

@Test("brackets, a wrong text and a truncated file are errors")
func noJSON() throws {
    let brackets = String(repeating: "[", count: 5_000_000)
    for text in [
        brackets, String(repeating: "[],", count: 5_000_000), "[" + String(repeating: "[],", count: 5_000_000), "",
        "1e999999", "{\"a\": \"\\ud800\"}", "\"", "nul",
    ] {
        #expect(throws: ShardmillError.self) { try Tokenizer(data: Data(text.utf8)) }
    }
    #expect(throws: ShardmillError.self) { try Tokenizer(data: Data([0x7B, 0x22, 0xFF, 0x22, 0x3A, 0x31, 0x7D])) }
    let file = Array(try #require(made.first).file.utf8)
    for count in stride(from: 0, to: file.count, by: 97) {
        #expect(throws: ShardmillError.self) { try Tokenizer(data: Data(file[..<count])) }
    }
}

@Test("numbers are JSON's, not Swift's")
func numbers() throws {
    for text in ["0", "-0", "10", "-1.5e+3", "0.25", "1e-3"] { _ = try JSON.parse(Array("[\(text)]".utf8)) }
    for text in ["+1", "01", "-01", ".5", "-", "--1", "+", "1.2.3", "0x1"] {
        #expect(throws: ShardmillError.self, "\(text)") { try JSON.parse(Array("[\(text)]".utf8)) }
    }
}

@Test("BERT's normalizer keeps what Unicode has not assigned")
func bertKeeps() throws {
    let json = try JSON.parse(Array(#"{"type": "BertNormalizer", "lowercase": false}"#.utf8))
    let text = "a\u{378}b\u{FFFE}c\u{10FFFF}d\u{200D}\u{E000}\u{1}e"
    let found = try Normalizer(json).apply(Array(text.utf8)[...])
    #expect(string(found).unicodeScalars.elementsEqual("a\u{378}b\u{FFFE}c\u{10FFFF}de".unicodeScalars))
}

/// Return the tokenizer "gpt2" with a regular expression in a place of its own.
private func tokenizer(regex: String, in key: String) throws -> Tokenizer {
    let one = try #require(made.first { $0.name == "gpt2" })
    var file = try #require(try JSONSerialization.jsonObject(with: Data(one.file.utf8)) as? [String: Any])
    let pattern = ["Regex": regex]
    file[key] =
        key == "normalizer" || key == "decoder"
        ? ["type": "Replace", "pattern": pattern, "content": "-"] as [String: Any]
        : [
            "type": "Sequence",
            "pretokenizers": [
                ["type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false] as [String: Any],
                ["type": "ByteLevel", "add_prefix_space": false, "use_regex": false],
            ],
        ]
    return try Tokenizer(data: try JSONSerialization.data(withJSONObject: file))
}

@Test("a regular expression that goes back without end is an error, and long texts of an honest one are not")
func hostileExpressions() throws {
    let word = String(repeating: "a", count: 5000)
    for regex in [
        "(a+)+$", "(a|aa)+$", "(.*)*x", "(a|b|ab)*c", "^(a+)+b|x", #"(\w+\s?)+$"#, "a*a*a*a*b", "(?=(a+)+$)b",
    ] {
        for key in ["pre_tokenizer", "normalizer"] {
            let made = try tokenizer(regex: regex, in: key)
            #expect(try !made.encode("aaa b").isEmpty)
            if ["(a|b|ab)*c", "(?=(a+)+$)b"].contains(regex) {  // may end in time: the steps grow by the square
                if let ids = try? made.encode(word + "!") { #expect(!ids.isEmpty) }
                continue
            }
            #expect("\(regex) in \(key)") { try made.encode(word + "!") } throws: {
                ($0 as? ShardmillError)?.kind == .tokenizer
            }
        }
    }
    let honest = try tokenizer(regex: #"\d{1,3}|[^\s\d]+[\r\n]*|\s+(?!\S)|\s+"#, in: "pre_tokenizer")
    for text in [" ", "a", "7", " a", "a\n", "\u{1F480}", "é 12 "] {
        let long = String(repeating: text, count: 100_000)
        #expect(honest.decode(try honest.encode(long)) == long)
    }
    #expect(throws: ShardmillError.self) { try tokenizer(regex: "a", in: "decoder") }
}

@Test("whatever the regular expression, a text is divided or refused in time")
func drawnExpressions() throws {
    var numbers = Xorshift()
    let pieces = [
        "a", "b", ".", #"\s"#, #"\S"#, #"\w"#, #"\p{L}"#, "[^a]", "(?:a|ab)", "(?!b)", "(?<=a)", "^", "$", "|", "(",
        ")",
        "(?:", "*", "+", "?", "*?", "+?", "{2,}", "{1,30}", "*+", #"\1"#, "(?>", "(?i:",
    ]
    let texts = [String(repeating: "a", count: 400) + "!", String(repeating: "ab ", count: 2000), "", " \n"]
    let clock = ContinuousClock()
    var (read, refused) = (0, 0)
    for _ in 0..<3000 {
        let regex = (0...numbers.next(9)).map { _ in pieces[numbers.next(pieces.count)] }.joined()
        guard let pattern = try? Pattern(regex: regex, scans: false) else { continue }
        read += 1
        for text in texts {
            let bytes = Array(text.utf8)[...]
            var found: [Pattern.Piece]?
            let time = clock.measure { found = try? pattern.split(bytes) }
            #expect(time < .seconds(60), "\(regex)")  // without a count it takes years; a busy machine, 20 s
            if let found {
                #expect(found.map { bytes[$0.range] }.joined().elementsEqual(bytes), "\(regex)")
            } else {
                refused += 1
            }
        }
    }
    #expect(read > 400 && refused > 0, "\(read), \(refused)")
}

/// Marsaglia, "Xorshift RNGs", 2003.
private struct Xorshift {
    private var state: UInt64 = 88_172_645_463_325_252

    /// Return a number from 0 to `count` - 1.
    mutating func next(_ count: Int) -> Int {
        state ^= state << 13
        state ^= state >> 7
        state ^= state << 17
        return Int(state % UInt64(count))
    }
}

@Test(
    "a file with changed bytes is read or refused, and never ends the program",
    arguments: ["gpt2", "metaspace", "bert", "qwen"])
func mutations(name: String) throws {
    let one = try #require(made.first { $0.name == name })
    let file = Array(one.file.utf8)
    var numbers = Xorshift()
    func next(_ count: Int) -> Int { numbers.next(count) }
    for _ in 0..<60 {
        var changed = file
        for _ in 0...next(4) {
            let at = next(changed.count)
            switch next(4) {
            case 0: changed[at] = UInt8(next(256))
            case 1: changed.removeSubrange(at..<min(changed.count, at + 1 + next(40)))
            case 2:
                changed.insert(
                    contentsOf: Array(["9999999", "-1", "[[", "null", "\\u0000", "{}", "1e308"][next(7)].utf8), at: at)
            default: changed.replaceSubrange(at..<at, with: changed[max(0, at - next(60))..<at])
            }
        }
        do {
            let tokenizer = try Tokenizer(data: Data(changed))
            for text in one.texts.prefix(4) { _ = tokenizer.decode(try tokenizer.encode(text)) }
            _ = tokenizer.decode([-1, 0, 1 << 40])
        } catch is ShardmillError {}
    }
}

@Test("an expression that leaves most of a text out takes prose of any length")
func sparseExpressions() throws {
    let sentence = "In 1999 the 12 ships, each of 250 tonnes, left; 東京へ 3 days later came «сто» more.\n"
    for length in [100, 1000, 5000] {
        let prose = String(String(repeating: sentence, count: length / sentence.count + 1).prefix(length))
        for regex in [
            #"\p{N}{1,3}"#, "[一-龥぀-ゟ゠-ヿ]+", "[0-9][0-9][0-9]", #"\w+|[^\w\s]+"#, "zebra",
            #"[!"$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|\s+"#,
        ] {
            let divided = try Pattern(regex: regex, scans: false).split(Array(prose.utf8)[...])
            #expect(divided.map { Array(prose.utf8)[$0.range] }.joined().elementsEqual(prose.utf8), "\(regex)")
            #expect(divided.contains { $0.matches } == (regex != "zebra"), "\(regex)")
            let replaced = try Pattern(regex: regex, scans: false).replace(Array(prose.utf8)[...], with: [])
            #expect(replaced.count < prose.utf8.count || regex == "zebra", "\(regex)")
        }
    }
}
