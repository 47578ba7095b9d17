import Foundation
import ShardmillDecode
import ShardmillPipe
import ShardmillText

// shardmill-check BUILD  (grows)
let arguments = CommandLine.arguments
if arguments[1] == "replay" { exit(try await replay(Array(arguments[2...])) ? 0 : 1) }  // KIT [RESULT]
if arguments[1] == "tokenize" {  // TOKENIZER TEXTS RESULT
    let clock = ContinuousClock()
    let start = clock.now
    let tokenizer = try Tokenizer(URL(fileURLWithPath: arguments[2]))
    let loaded = clock.now
    let texts = try JSONDecoder().decode([String].self, from: Data(contentsOf: URL(fileURLWithPath: arguments[3])))
    let begin = clock.now
    let ids = texts.map { tokenizer.encode($0) }
    let encoded = clock.now
    let back = ids.map { tokenizer.decode($0, skipSpecialTokens: false) }
    let decoded = clock.now
    FileHandle.standardError.write("load \(loaded - start) encode \(encoded - begin) decode \(decoded - encoded)\n".data(using: .utf8)!)
    let result: [String: Any] = ["ids": ids, "texts": back]
    try JSONSerialization.data(withJSONObject: result).write(to: URL(fileURLWithPath: arguments[4]))
    exit(0)
}
let manifest = try Manifest(folder: URL(fileURLWithPath: arguments[1]))
let backend = PipeBackend()
let session = try Session(try Engine(manifest, backend: backend))
var options = Options(maxTokens: Int(arguments[2])!)
options.sampling.temperature = Double(arguments[3])!
let generation = try Generation(
    session, prompt: arguments[4...].map { Int($0)! }, options: options, drafter: NgramDrafter())
var out: [Int] = []
while let token = try generation.next() { out.append(token.id) }
let report: [String: Any] = [
    "tokens": out, "reason": generation.reason!.rawValue, "passes": generation.passes, "accepted": generation.accepted,
]
try backend.ask(["op": "report", "report": report])
