import Foundation
import ShardmillDecode
import ShardmillText

/// Write the tokens of texts, and the texts of these tokens; say on standard error how long each step took.
func tokenize(_ arguments: [String]) throws {
    guard arguments.count == 3 else { throw Usage("tokenize takes TOKENIZER TEXTS RESULT") }
    let clock = ContinuousClock()
    let start = clock.now
    let tokenizer = try Tokenizer(URL(fileURLWithPath: arguments[0]))
    let loaded = clock.now
    let texts = try JSONDecoder().decode([String].self, from: read(URL(fileURLWithPath: arguments[1])))
    let begin = clock.now
    let ids = try texts.map { try tokenizer.encode($0) }
    let encoded = clock.now
    let back = ids.map { tokenizer.decode($0, skipSpecialTokens: false) }
    let times = "load \(loaded - start) encode \(encoded - begin) decode \(clock.now - encoded)\n"
    FileHandle.standardError.write(Data(times.utf8))
    try write(["ids": ids, "texts": back], to: URL(fileURLWithPath: arguments[2]))
}

/// Return a file's bytes.
func read(_ file: URL) throws -> Data {
    guard let data = try? Data(contentsOf: file) else { throw ShardmillError(.request, "\(file.path) can't be read") }
    return data
}

/// Write JSON into a file.
func write(_ content: [String: Any], to file: URL) throws {
    do {
        try JSONSerialization.data(withJSONObject: content, options: .sortedKeys).write(to: file)
    } catch {
        throw ShardmillError(.request, "\(file.path) can't be written")
    }
}
