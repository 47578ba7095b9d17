import Foundation
import ShardmillDecode

do {
    try await run(Array(CommandLine.arguments.dropFirst()))
} catch let error as Usage {
    report("\(error.message) (shardmill-check --help lists the options)")
    exit(2)
} catch let error as ShardmillError {
    report(error.message)
    exit(1)
} catch {
    report(describe(error))
    exit(1)
}

/// Run the command that the arguments name.
private func run(_ arguments: [String]) async throws {
    switch arguments.first {
    case nil: throw Usage("give a build's folder")
    case "--help", "-h": print(Usage.text)
    case "replay": if try await !replay(Array(arguments.dropFirst())) { exit(1) }
    case "check": if try await !check(Array(arguments.dropFirst())) { exit(1) }
    case "read": try await read(Array(arguments.dropFirst()))
    case "talk": try await talk(Array(arguments.dropFirst()))
    case "draw": try draw(Array(arguments.dropFirst()))
    case "texts": try texts(Array(arguments.dropFirst()))
    case "tokenize": try tokenize(Array(arguments.dropFirst()))
    default: try await answer(Command(arguments))
    }
}

/// Write one line on standard error.
private func report(_ message: String) {
    let line = "shardmill-check: " + message.split(whereSeparator: \.isNewline).joined(separator: " ") + "\n"
    FileHandle.standardError.write(Data(line.utf8))
}
