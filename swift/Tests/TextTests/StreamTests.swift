import Foundation
import ShardmillDecode
import Testing

@testable import ShardmillText

private struct Streamed: Decodable {
    let pieces: [[UInt8]]
    let prompt: Int
    let stop, pushed: [String]
    let stopped: Bool
    let rest: String
}

@Test("text becomes final with the same tokens as in Python")
func streams() throws {
    let folder = URL(fileURLWithPath: #filePath).deletingLastPathComponent().deletingLastPathComponent()
    let data = try Data(contentsOf: folder.appendingPathComponent("Vectors/streams.json"))
    for one in try JSONDecoder().decode([Streamed].self, from: data) {
        let decode = { (tokens: [Int]) in String(decoding: tokens.flatMap { one.pieces[$0] }, as: UTF8.self) }
        var stream = try TextStream(stop: one.stop, prompt: Array(0..<one.prompt), decode: decode)
        let pushed = (one.prompt..<one.pieces.count).map { stream.push($0) }
        #expect(pushed.map { Array($0.unicodeScalars) } == one.pushed.map { Array($0.unicodeScalars) })
        #expect(stream.stopped == one.stopped)
        #expect(stream.flush() == one.rest)
    }
}

@Test("an empty stop string is refused")
func emptyStop() {
    #expect(throws: ShardmillError.self) { try TextStream(stop: ["a", ""]) { _ in "" } }
}
