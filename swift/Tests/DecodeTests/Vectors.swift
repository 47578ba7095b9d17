import Foundation

/// Cases that swift/scripts/write_vectors.py recorded from the Python runtime.
func vectors<Case: Decodable>(_ name: String, _ type: Case.Type = Case.self) throws -> [Case] {
    let folder = URL(fileURLWithPath: #filePath).deletingLastPathComponent().deletingLastPathComponent()
    let file = folder.appendingPathComponent("Vectors/\(name).json")
    return try JSONDecoder().decode([Case].self, from: Data(contentsOf: file))
}
